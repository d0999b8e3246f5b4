"""What several folders of tests use, and measure/: checkpoints, engines, the launcher of ranks."""

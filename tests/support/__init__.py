"""What several folders of tests use, and measure/: checkpoints, engines, the launcher of ranks."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

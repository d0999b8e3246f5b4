r"""Trains like train.py, in a job whose machines die and join. The same command starts it and, on
whatever ranks are left, continues from the newest complete checkpoint, on the disk or in the
machines' memory. Start it from the root of the repository:

    torchrun --standalone --nproc-per-node 4 -m examples.train_elastic --elastic \
        --run_name elastic --checkpoint_dir ckpt_elastic
    torchrun --standalone --nproc-per-node 2 -m examples.train_elastic --elastic \
        --run_name elastic --checkpoint_dir ckpt_elastic

On SIGTERM it saves and exits with 143. train_tp_sp.py and train_3d.py use the functions of this
file.
"""

import argparse
import contextlib
import os
from pathlib import Path

import deepspeed
import torch

import train
import universal
from train import RANK, fail
from universal import batches, elastic, exact, mirror


def positive(text):
    """The argparse type of a number that counts something."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def argument_parser(description):
    parser = train.argument_parser()
    parser.description = description
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="start, or go on from the newest complete checkpoint of any layout",
    )
    parser.add_argument(
        "--keep",
        type=positive,
        metavar="N",
        help="remove all but the N newest checkpoints; default: keep all",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=600,
        help="seconds after which a silent rank is given up; default: 600",
    )
    return parser


@contextlib.contextmanager
def exit_on_error():
    """Ends with one line in place of a traceback."""
    try:
        yield
    except (ValueError, universal.CheckpointError) as error:
        fail(error)


def prepare(args, model_parallel=1):
    """Check the arguments, and join the other ranks. model_parallel: ranks that compute one
    micro-batch together. Returns the number of data-parallel ranks."""
    if "RANK" not in os.environ:
        fail("start it with a launcher: see the first lines of --help")
    if args.elastic:
        if args.resume or args.stock or args.universal_checkpoint or args.checkpoint_tag:
            fail(
                "--elastic finds the checkpoint by itself: "
                "leave out --resume and what belongs to it"
            )
    world = int(os.environ["WORLD_SIZE"])
    if world % model_parallel:
        fail(f"{world} ranks do not divide by {model_parallel}")
    ranks = world // model_parallel
    train.check_arguments(args, ranks)
    if not args.stock:
        universal.install()
    train.init_distributed(timeout=elastic.wait_at_most(args.timeout))
    return ranks


def start(args, ranks, build=train.GPT, mpu=None, names=train.RUN, **changes):
    """Returns an engine, the texts to train on and to validate with, and the run. build: makes the
    model. names: of the arguments that a resume must have in common. changes: to the config."""
    text, held_out, fingerprint = train.load_text(args.data, args.seq_len)
    run = train.describe_run(args, fingerprint, names)
    train.check_runs(args, run)
    torch.manual_seed(args.seed)
    model = build(args.n_layer, args.n_head, args.n_embd, args.seq_len, args.dropout)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=train.parameter_groups(model),
        config=train.ds_config(args, ranks) | changes,
        mpu=mpu,
    )
    engine.lr_scheduler.step()  # as in train.py
    return engine, text, held_out, run


def load(engine, args, run, memory):
    """Load the checkpoint to continue from, if any. Returns what was saved with it; without one,
    step 0."""
    if args.elastic:
        with exit_on_error():
            folder = (memory or mirror).gather(args.checkpoint_dir)
            path, saved = universal.load_checkpoint(engine, folder, missing_ok=True)
        if path:
            train.check_run(path, saved["run"], run)
            train.say(f"resumed from {path} at step {saved['step']}")
            return saved
    return train.resume(engine, args, run) if args.resume else {"step": 0}


def open_log(run_name, saved):
    """Opens the log like train.py. A checkpoint also holds the rows of steps that were not logged
    yet."""
    rows = saved.get("rows", [])
    log = train.open_log(run_name, saved["step"] - len(rows))
    log.writerows(rows)
    return log


def write_rows(log, rows, committed, monitor):
    """Log the rows of the steps up to `committed`. Returns the others."""
    for row in rows if log else []:
        if row["step"] <= committed:
            train.write_row(log, row, monitor)
    return [row for row in rows if row["step"] > committed]


def rows_of(engine, args, text, held_out, sharers=1):
    """Returns rows(done), which trains the steps after `done`, for resume_and_train(). sharers:
    ranks that share a sequence."""

    def rows(done):
        share = batches.share(engine, sharers)
        return train.train(engine, share, args, text, held_out, done)

    return rows


def resume_and_train(engine, args, run, rows, memory=None):
    """Resume, train, log, save, and exit. rows(done) trains the steps after `done` and yields their
    rows of the log. memory: a Mirror."""
    saved = load(engine, args, run, memory)
    step = saved["step"]
    stopping = elastic.watch_sigterm(engine.device)  # SIGTERM: the same answer on all ranks
    log = open_log(args.run_name, saved) if RANK == 0 else None
    waiting = []  # rows of steps that may be done again
    for row in rows(step):
        step = row["step"]
        waiting.append(row)
        state = {"step": step, "run": run, "rows": [*waiting]}
        committed = memory.save(state) if memory else step
        if memory and memory.every > 1:  # steps between two copies may be done again anyway
            committed = step
        stop = stopping()
        if stop or step % args.checkpoint_interval == 0:
            elastic.save(engine, args.checkpoint_dir, state, args.keep)
        waiting = write_rows(log, waiting, committed, engine.monitor)
        if stop:
            break
    finished = step == args.steps
    if memory:
        memory.finish()
        write_rows(log, waiting, step, engine.monitor)
    if memory and finished:
        memory.close()
    elastic.exit_together(finished)


def start_exact(args, ranks):
    # Unless told otherwise, ZeRO-3 uses its own matrix product, which rounds differently.
    zero = {"stage": args.zero_stage, "memory_efficient_linear": False}
    # Runs with and without --exact must not resume each other.
    started = start(args, ranks, names=[*train.RUN, "exact"], zero_optimization=zero)
    with exit_on_error():
        exact.install(started[0])
    return started


def start_mirror(engine, args):
    """Start a mirror in this machine's memory. MIRROR_ROOT: ranks that have one each stand for
    several machines."""
    job = "_".join(Path(args.checkpoint_dir).resolve().parts[1:])
    folder = Path(os.environ.get("MIRROR_ROOT", "/dev/shm"), job)
    with exit_on_error():
        return mirror.Mirror(engine, folder, args.mirror)


def main():
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--mirror",
        type=positive,
        metavar="K",
        help="hold every K-th step in memory, on two machines",
    )
    parser.add_argument(
        "--exact", action="store_true", help="every bit alike on any number of ranks; fp32"
    )
    args = parser.parse_args()
    if args.mirror and not args.elastic:
        fail(
            "--mirror is for --elastic: without it nothing looks into the memory at the next start"
        )
    if args.exact and args.dtype != "fp32":
        fail(f"--exact needs --dtype fp32: sums in {args.dtype} have too few bits to be exact")
    if args.exact and args.offload:
        fail(
            "--exact does not go with --offload: "
            "the optimizer of a CPU may round unlike that of a GPU"
        )
    ranks = prepare(args)
    engine, text, held_out, run = (start_exact if args.exact else start)(args, ranks)
    memory = start_mirror(engine, args) if args.mirror else None
    resume_and_train(engine, args, run, rows_of(engine, args, text, held_out), memory)


if __name__ == "__main__":
    main()

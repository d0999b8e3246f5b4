"""Trains like train.py, in a job whose machines die and join. The same command starts it and, on
whatever ranks are left, continues from the newest whole checkpoint, on the disk or in the machines'
memory.

    torchrun --standalone --nproc-per-node 4 train_elastic.py --elastic --run_name elastic --checkpoint_dir ckpt_elastic
    torchrun --standalone --nproc-per-node 2 train_elastic.py --elastic --run_name elastic --checkpoint_dir ckpt_elastic

On SIGTERM it saves and exits with 143. train_tp_sp.py and train_3d.py use the functions of this
file."""

import contextlib
import os
from pathlib import Path

import data
import train
import universal
from data import Log, check_arguments, check_run, fail, positive, say
from universal import elastic, exact, mirror


def arguments(description):
    parser = train.arguments()
    parser.description = description
    arg = parser.add_argument
    arg(
        "--elastic",
        action="store_true",
        help="start, or go on from the newest whole checkpoint of any layout",
    )
    arg(
        "--keep",
        type=positive,
        metavar="N",
        help="remove all but the N newest checkpoints; default: keep all",
    )
    arg(
        "--timeout",
        type=positive,
        default=600,
        help="seconds after which a silent rank is given up",
    )
    return parser


@contextlib.contextmanager
def refusing():  # with one line, not a traceback
    try:
        yield
    except (ValueError, universal.CheckpointError) as error:
        fail(error)


def prepare(args, model_parallel=1):
    """Check the arguments; make the process group. model_parallel: ranks that compute one
    micro-batch together."""
    if args.elastic:
        if args.resume or args.stock or args.universal_checkpoint or args.checkpoint_tag:
            fail(
                "--elastic finds the checkpoint by itself: leave out --resume and what belongs to it"
            )
        with refusing():
            elastic.enlist(
                args.train_batch_size, args.train_micro_batch_size_per_gpu, model_parallel
            )
    check_arguments(args, model_parallel)
    if not args.stock:
        universal.install()
    train.init_distributed(timeout=elastic.wait_at_most(args.timeout))


def load(engine, args, run, memory):
    """Load the checkpoint to continue from, if any. Returns what was saved with it; without one,
    step 0."""
    if args.elastic:
        with refusing():
            folder = (memory or mirror).gather(args.checkpoint_dir)
            path, saved = universal.load_checkpoint(engine, folder, missing_ok=True)
        if path:
            check_run(path, saved["run"], run)
            say(f"resumed from {path} at step {saved['step']}")
            return saved
    return (
        train.resume(engine, args.checkpoint_dir, args.checkpoint_tag, run)
        if args.resume
        else {"step": 0}
    )


def go_on(engine, args, run, rows, memory=None):
    """Resume, train, log, save, and exit. rows(done) trains the steps after `done` and yields their
    rows of the log."""
    saved = load(engine, args, run, memory)
    stop = elastic.listen(engine.device)  # for SIGTERM; stop() gives the same answer on all ranks
    log = Log(args.run_name, step := saved["step"], saved.get("row"), engine.monitor)
    for row in rows(step):
        state = {"step": (step := row["step"]), "run": run}
        if memory:
            memory(state | {"row": row})  # if this run dies before it logs the row, the next will
        log.write(**row)
        if (told := stop()) or step % args.checkpoint_interval == 0:
            elastic.save(engine, args.checkpoint_dir, state, args.keep)
        if told:
            break
    if memory and step == args.steps:
        memory.close()
    elastic.leave(finished=step == args.steps)


def main():
    parser = arguments(__doc__)
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
            "--exact does not go with --offload: the optimizer of a CPU may round unlike that of a GPU"
        )
    data.RUN += ("exact",) * args.exact  # runs with and without --exact must not resume each other
    prepare(args)
    # Unless told otherwise, ZeRO-3 uses its own matrix product, which rounds differently.
    zero = {"zero_optimization": {"stage": args.zero_stage, "memory_efficient_linear": False}}
    engine, texts, run = train.start(args, **zero if args.exact else {})
    with refusing():
        if args.exact:
            exact.install(engine)
        job = str(Path(args.checkpoint_dir).resolve()).strip("/").replace("/", "_")
        place = Path(
            os.environ.get("MIRROR_ROOT", "/dev/shm"), job
        )  # MIRROR_ROOT simulates several machines on one
        memory = mirror.Mirror(engine, place, args.mirror) if args.mirror else None
    go_on(engine, args, run, lambda done: train.train(engine, args, texts, done), memory)


if __name__ == "__main__":
    main()

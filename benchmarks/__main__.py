"""``python -m benchmarks``: our time, memory and error beside PyTorch's, in one run.

Without arguments: the reference workload on the GPU if there is one, in float32 with tf32 off and
on, or with a batch of 128 on the CPU, in under two minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from .cases import (
    CASES,
    FORWARD,
    GROUPS,
    PASSES,
    REF_CPU,
    Case,
    Setting,
    make_inputs,
    make_oracle,
)
from .compare import Options, compare
from .peers import PEER_KINDS, Allowance, ours, peers
from .report import Table, environment, to_json
from .roofline import measure_ceilings
from .special import SPECIAL, kernels, overhead, threads
from .training import train

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
PATHS = ("auto", "fused", "two_stage", "eager")


def at_least(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    """What argparse takes as a number of at least ``least``."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(least - 1)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return value

    return number


def device(text: str) -> torch.device:
    """What argparse takes as a device that this PyTorch can run on."""
    try:
        found = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error).partition("\n")[0]) from None
    counts = {"cpu": 1, "cuda": torch.cuda.device_count()}
    if (found.index or 0) >= counts.get(found.type, 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device that there is here")
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="print the cases and stop")
    add("--cases", nargs="+", metavar="NAME", help="see --list; 'all', 'filters': groups")
    add(
        "--batch",
        nargs="+",
        type=at_least(int, 1),
        help="these batch sizes instead of the case's own",
    )
    add("--device", type=device, help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    add("--dtype", nargs="+", choices=DTYPES, default=["float32"])
    add(
        "--precision",
        nargs="+",
        choices=("ieee", "tf32"),
        help="of float32 (default: both, on CPU ieee)",
    )
    add("--path", nargs="+", choices=PATHS, help="ours (default: fused and two_stage; auto on CPU)")
    add("--pass", nargs="+", choices=PASSES, dest="passes", help="(default: all)")
    add(
        "--peers",
        nargs="+",
        choices=(*PEER_KINDS, "none"),
        help="(default: all; no autotune on CPU)",
    )
    add("--repeats", type=at_least(int, 1), help="calls per median (default: 20, on CPU at most 9)")
    seconds = at_least(float, 0)
    add("--seconds", type=seconds, default=6.0, help="on CPU, the most one table's calls may take")
    add("--compile-seconds", type=seconds, help="the most all compilations may take (60, GPU 600)")
    add("--seed", type=int, default=1, help="(default: 1, whose ref_b128 has nothing on a knee)")
    add("--quick", action="store_true", help="an eighth of the batch, few repeats, eager peers")
    add("--markdown", action="store_true", help="markdown tables with machine and versions per row")
    add("--json", type=Path, metavar="FILE", help="write everything measured to a file as well")
    add("--commit", help="what to record as the commit (default: ask git)")
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"--json: there is no folder for {options.json}")
    unknown = set(options.cases or ()) - {*CASES, *SPECIAL, *GROUPS}
    if unknown:
        parser.error(f"no case named {', '.join(sorted(unknown))}; --list prints them")
    return options


def list_cases() -> str:
    lines = [f"{case.name:20} {case.describe()}" for case in CASES.values()]
    return "\n".join([*lines, *(f"{name:20} {text}" for name, text in SPECIAL.items())])


def settings_of(arguments: argparse.Namespace, cuda: bool) -> list[Setting]:
    precisions = arguments.precision or (["ieee", "tf32"] if cuda else ["ieee"])
    settings = []
    for name in arguments.dtype:
        for precision in precisions if name == "float32" else ["ieee"]:
            settings.append(Setting(DTYPES[name], precision))
    return settings


def shapes_of(arguments: argparse.Namespace, names: Sequence[str]) -> list[Case]:
    cases = [c for name in names for c in GROUPS.get(name) or (CASES[name],)]
    if arguments.batch:
        return [case.with_batch(batch) for case in cases for batch in arguments.batch]
    if arguments.quick:
        return [case.with_batch(max(1, case.batch // 8)) for case in cases]
    return cases


def tables(arguments: argparse.Namespace, options: Options) -> Iterator[Table]:
    cuda = options.device.type == "cuda"
    names = arguments.cases or (["ref"] if cuda else [REF_CPU.name, "threads"])
    settings = settings_of(arguments, cuda)
    paths = tuple(arguments.path or (("fused", "two_stage") if cuda else ("auto",)))
    kinds = arguments.peers or (PEER_KINDS[:1] if arguments.quick else PEER_KINDS[: 2 + cuda])
    implementations = [*ours(paths), *peers(tuple(kinds), cuda)]
    for case in shapes_of(arguments, [name for name in names if name not in SPECIAL]):
        passes = arguments.passes or PASSES
        for setting in settings:
            inputs = make_inputs(case, setting.dtype, options.device, arguments.seed)
            oracle = make_oracle(case, inputs, gradients=set(passes) != {FORWARD})
            for pass_name in passes:
                if not (cuda or arguments.quick):
                    options.ceilings.refresh()
                yield compare(case, setting, pass_name, implementations, inputs, oracle, options)
    for name in names:
        if name == "threads":
            for case in shapes_of(arguments, [REF_CPU.name]):
                yield threads(case, settings[0], paths, options)
        elif name == "overhead":
            yield overhead(settings[0], options)
        elif name == "training":
            yield train(settings, paths, options, arguments.quick)
        elif name == "kernels":
            storage = [Setting(DTYPES[dtype]) for dtype in ("float32", "float16", "bfloat16")]
            yield kernels(storage, options, batch=128 if arguments.quick else None)


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse(arguments)
    if parsed.list:
        print(list_cases())
        return 0
    device = torch.device(parsed.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cuda = device.type == "cuda"
    if cuda:
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    misplaced = "threads" if cuda else "kernels"
    if misplaced in (parsed.cases or ()):
        print(f"{misplaced}: only with --device {'cpu' if cuda else 'cuda'}", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    machine = environment(device, parsed.commit)
    ceilings = measure_ceilings(device, parsed.quick)
    options = Options(
        device=device,
        repeats=parsed.repeats
        or ((5 if parsed.quick else 20) if cuda else 3 if parsed.quick else 9),
        seconds=parsed.seconds,
        allowance=Allowance(parsed.compile_seconds or (600 if cuda else 60)),
        ceilings=ceilings,
    )
    print(machine.line(), end="\n\n")
    typed = " ".join(sys.argv[1:] if arguments is None else arguments)
    finished: list[Table] = []
    for table in tables(parsed, options):
        print(table.markdown(machine) if parsed.markdown else table.text(), end="\n\n", flush=True)
        finished.append(table)
        if parsed.json:
            rates = {"copy": ceilings.copy, **ceilings.matmul}
            parsed.json.write_text(to_json(machine, rates, typed, finished))
    print(f"ceilings: {'; '.join(ceilings.lines())}")
    print(f"speed-up: the best peer's time over this one's; {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

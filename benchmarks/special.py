"""Measurements that are not a shape against its peers: threads, overhead, the reduction kernel."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import convnormpool

from .cases import (
    BACKWARD,
    CASES,
    FORWARD,
    Case,
    Inputs,
    Setting,
    eager_chain,
    make_inputs,
    make_oracle,
    result_names,
)
from .compare import Options
from .peers import backend_flags, bind, in_words, our_chain, ours
from .report import Cell, Table
from .roofline import count
from .timing import L2Flush, Time, nbytes, time_cpu, time_cuda, time_host

ERROR = "error against float64"


def threads(case: Case, setting: Setting, paths: Sequence[str], options: Options) -> Table:
    """Our results' bits and times for one thread and for every thread the process has."""
    columns = ("pass", "path", "threads", "ms (low-high)", "of limit", "same bits", "sha256", ERROR)
    table = Table(f"{case.name} {setting.label}, bits and times by number of CPU threads", columns)
    inputs = make_inputs(case, setting.dtype, torch.device("cpu"), seed=1)
    oracle = make_oracle(case, inputs, gradients=True)
    available = torch.get_num_threads()
    counts = sorted({1, 2, available})
    try:
        for pass_name in (FORWARD, BACKWARD):
            work = count(case, pass_name, setting.dtype.itemsize)
            limit = options.ceilings.limit(work, setting)
            for implementation in ours(tuple(paths)):
                first = ""
                call = bind(implementation, case, setting, inputs, pass_name)
                for number in counts:
                    torch.set_num_threads(number)
                    row: dict[str, Cell] = {
                        "pass": pass_name,
                        "path": implementation.path,
                        "threads": number,
                    }
                    table.rows.append(row)
                    try:
                        results = call()
                    except Exception as error:
                        row[ERROR] = "not run"
                        table.notes.append(f"{pass_name}, {implementation.name}: {in_words(error)}")
                        break
                    digest = _digest(results)
                    first = first or digest
                    [time] = time_cpu([call], options.repeats, options.seconds / 4)
                    row |= {
                        "ms (low-high)": time,
                        "of limit": f"{100 * limit.ms / time.median:.1f}%",
                        "same bits": digest == first,
                        "sha256": digest[:12],
                        ERROR: oracle.errors(result_names(pass_name), results),
                    }
    finally:
        torch.set_num_threads(available)
    table.notes.append(f"the limit is that of {available} threads; the bits are of every result")
    return table


def _digest(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# Tiny inputs that the fused path takes.
OVERHEAD_CASES = {
    "cpu": Case("overhead", 1, 1, (2, 2, 2), 4, (1, 1, 1), num_groups=2),
    "cuda": Case("overhead", 1, 3, (4, 4, 4), 16, (4, 4, 4), num_groups=4),
}


def overhead(setting: Setting, options: Options) -> Table:
    """What one call costs when there is nothing to compute: ours beside the same four ops."""
    columns = ("call", "eager us (low-high)", "ours us (low-high)", "ours - eager us", ERROR)
    device = options.device
    case = OVERHEAD_CASES[device.type]
    table = Table(f"host time of one call on {case.describe()}, {setting.label}", columns)
    inputs = make_inputs(case, setting.dtype, device, seed=2)
    eager, mine = eager_chain(case), our_chain(case, setting, "auto")
    compile_: Callable[[object], Callable[..., Tensor]] = functools.partial(
        torch.compile, fullgraph=True, dynamic=False
    )
    oracle = make_oracle(case, inputs, gradients=True)
    pairs: list[tuple[str, str, Callable[[], Pair]]] = [
        ("function, no_grad", FORWARD, lambda: (eager, mine)),
        ("function, grad", FORWARD, lambda: (eager, mine)),
        ("function, forward + backward", BACKWARD, lambda: (eager, mine)),
        ("module, no_grad", FORWARD, lambda: _modules(case, setting, inputs)),
        ("module, grad", FORWARD, lambda: _modules(case, setting, inputs)),
        ("compiled, no_grad", FORWARD, lambda: (compile_(eager), compile_(mine))),
        ("compiled, grad", FORWARD, lambda: (compile_(eager), compile_(mine))),
        ("compiled, forward + backward", BACKWARD, lambda: (compile_(eager), compile_(mine))),
    ]
    for title, pass_name, build in pairs:
        row: dict[str, Cell] = {"call": title}
        table.rows.append(row)
        try:
            chains = build()
            leaves = [t.detach().requires_grad_("no_grad" not in title) for t in inputs.arguments()]
            calls = [_overhead_call(chain, leaves, inputs, pass_name) for chain in chains]
            names = result_names(pass_name)
            with backend_flags(setting):
                if title.startswith("compiled"):
                    with options.allowance.spend():
                        results = [call() for call in calls]
                else:
                    results = [call() for call in calls]
                errors = oracle.errors(names, results[1])
                times = time_host(calls, device, loops=200, rounds=options.repeats)
        except Exception as error:
            row[ERROR] = "not run"
            table.notes.append(f"{title}: {in_words(error)}")
            continue
        row["eager us (low-high)"], row["ours us (low-high)"] = times
        row["ours - eager us"] = times[1].median - times[0].median
        row[ERROR] = errors
    torch.compiler.reset()
    table.notes.append("a roofline has nothing to say here: the time is the host's alone")
    return table


Pair = tuple[Callable[..., Tensor], Callable[..., Tensor]]


def _overhead_call(
    chain: Callable[..., Tensor], leaves: Sequence[Tensor], inputs: Inputs, pass_name: str
) -> Callable[[], tuple[Tensor, ...]]:
    if pass_name == BACKWARD:

        def step() -> tuple[Tensor, ...]:
            out = chain(*leaves)
            return (out.detach(), *torch.autograd.grad(out, leaves, inputs.grad_out))

        return step
    return lambda: (chain(*leaves).detach(),)


def _modules(case: Case, setting: Setting, inputs: Inputs) -> Pair:
    """Ours and the modules it stands for, both with the inputs' parameters; called with x first."""
    module = convnormpool.ConvNormPool3d(
        case.in_channels,
        case.out_channels,
        case.kernel,
        case.num_groups,
        fp32_precision=setting.precision,
        device=inputs.x.device,
        dtype=setting.dtype,
    )
    names = ("conv.weight", "conv.bias", "group_norm.weight", "group_norm.bias")
    module.load_state_dict(dict(zip(names, inputs.arguments()[1:], strict=True)))
    chain = nn.Sequential(module.conv, nn.Hardswish(), module.group_norm)

    def with_grad(call: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, *_: Tensor) -> Tensor:
            if x.requires_grad:
                return call(x)
            with torch.no_grad():
                return call(x)

        return run

    return with_grad(lambda x: chain(x).mean((2, 3, 4))), with_grad(module)


def kernels(settings: Sequence[Setting], options: Options, batch: int | None = None) -> Table:
    """The reduction alone, on the reference workload's convolution output, beside one read."""
    columns = (
        "layout",
        "dtype",
        "act_moments ms (low-high)",
        "of one read",
        "y.sum() ms (low-high)",
        "one read ms",
        ERROR,
    )
    case = CASES["ref"]
    shape = case.with_batch(batch or case.batch).conv_output_shape
    table = Table(f'convnormpool::act_moments(y, "hardswish"), y {shape}', columns)
    flush = L2Flush(options.device)
    generator = torch.Generator(options.device).manual_seed(3)
    for setting in settings:
        wide = torch.randn(shape, device=options.device, generator=generator)
        for layout in (torch.contiguous_format, torch.channels_last_3d):
            y = wide.to(setting.dtype).contiguous(memory_format=layout)
            read = 1e3 * nbytes([y]) / options.ceilings.copy
            row: dict[str, Cell] = {
                "layout": str(layout).removeprefix("torch."),
                "dtype": str(setting.dtype).removeprefix("torch."),
                "one read ms": read,
            }
            table.rows.append(row)
            moments = functools.partial(torch.ops.convnormpool.act_moments, y, "hardswish")
            try:
                row[ERROR] = _moment_errors(y, *moments())
                time: Time = time_cuda(moments, flush, options.repeats)
                total = functools.partial(torch.sum, y, dtype=torch.float32)
                row["y.sum() ms (low-high)"] = time_cuda(total, flush, options.repeats)
            except Exception as error:
                row[ERROR] = "not run"
                table.notes.append(f"{row['dtype']}, {row['layout']}: {in_words(error)}")
                continue
            row["act_moments ms (low-high)"] = time
            row["of one read"] = f"{100 * read / time.median:.1f}%"
    table.notes.append("one read is y's bytes over the bytes a second of a large copy")
    return table


def _moment_errors(y: Tensor, mean: Tensor, m2: Tensor) -> dict[str, float]:
    index = torch.tensor([0, y.shape[0] // 2, y.shape[0] - 1], device=y.device)
    h = nn.functional.hardswish(y[index].double()).flatten(2)
    expected = {"mean": h.mean(2), "m2": h.var(2, correction=0) * h.shape[2]}
    actual = {"mean": mean[index], "m2": m2[index]}
    return {
        name: float((actual[name].double() - value).norm() / value.norm())
        for name, value in expected.items()
    }


SPECIAL: dict[str, str] = {
    "threads": "CPU: our bits and times for 1 thread and for all",
    "overhead": "host time of one call on a tiny input, beside eager's",
    "training": "a small classifier trained with ours and with eager's layer",
    "kernels": "GPU: the reduction kernel alone, beside one read of its input",
}

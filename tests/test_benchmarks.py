"""The benchmarks' counts, answers and reports: what they say about speed rests on these."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import cases, roofline, training
from benchmarks.__main__ import main
from benchmarks.cases import BACKWARD, BACKWARD_DW, CASES, FORWARD, TINY, Case, Setting
from benchmarks.compare import Options, compare
from benchmarks.peers import Allowance, ours, peers
from benchmarks.report import Environment, Table, show
from benchmarks.special import threads
from benchmarks.timing import Time, peak_extra_bytes, time_cpu

CPU = torch.device("cpu")
FLOAT32 = Setting(torch.float32)
MACHINE = Environment("H0", "1.2", "9.9", "8.8", "7.7", "abc", "2000-01-01", 2)


def options(repeats: int = 2) -> Options:
    ceilings = roofline.Ceilings(CPU, 1e10, {"float32 ieee": 1e11})
    return Options(CPU, repeats, seconds=1.0, allowance=Allowance(0), ceilings=ceilings)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cases_describe_convolutions_that_exist(case: Case) -> None:
    x = torch.empty(case.input_shape, device="meta")
    w = torch.empty(case.weight_shape, device="meta")
    with FlopCounterMode(display=False) as counter:
        y = F.conv3d(x, w, None, case.stride, case.padding, case.dilation, case.groups)
    assert tuple(y.shape) == case.conv_output_shape
    assert case.out_channels % case.num_groups == 0
    assert roofline.count(case, FORWARD, 4).flop == counter.get_total_flops()


@pytest.mark.parametrize(
    ("pass_name", "elements", "flop", "recompute"),
    [(FORWARD, 80, 512, 0), (BACKWARD, 236, 1536, 512), (BACKWARD_DW, 182, 1024, 512)],
)
def test_counts_equal_those_by_hand(
    pass_name: str, elements: int, flop: int, recompute: int
) -> None:
    # x 54, w 16, three vectors of 2, out 4; 8 positions of 8 products for 2 samples and channels.
    case = Case("hand", 2, 1, (3, 3, 3), 2, (2, 2, 2), num_groups=1)
    assert roofline.count(case, pass_name, 2) == roofline.Counts(2 * elements, flop, recompute)


def test_limit_is_the_slower_of_memory_and_math() -> None:
    ceilings = roofline.Ceilings(CPU, copy=1e9, matmul={"float32 ieee": 1e12})
    memory = ceilings.limit(roofline.Counts(2_000_000, 10**9, 0), FLOAT32)
    math = ceilings.limit(roofline.Counts(2_000_000, 3 * 10**9, 10**9), FLOAT32)
    assert (memory.bound, math.bound) == ("memory", "math")
    assert [memory.ms, math.ms, math.recompute_ms] == pytest.approx([2.0, 3.0, 4.0])


def test_float32_accuracy_on_a_gpu_may_cost_three_half_products() -> None:
    rates = {"float32 ieee": 50e12, "float16": 600e12}
    assert roofline.Ceilings(torch.device("cuda"), 1.0, rates).rate(FLOAT32) == 200e12


def test_oracle_in_chunks_equals_autograd_on_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "ORACLE_CHUNK_BYTES", 1)
    case = TINY.with_batch(5)
    inputs = cases.make_inputs(case, torch.float32, CPU, seed=4)
    oracle = cases.make_oracle(case, inputs, gradients=True, samples=3)
    leaves = [tensor.double().requires_grad_() for tensor in inputs.arguments()]
    out = cases.eager_chain(case)(*leaves)
    grads = torch.autograd.grad(out, leaves, inputs.grad_out.double())
    names = cases.result_names(BACKWARD)
    assert oracle.index.tolist() == [0, 2, 4]
    errors = oracle.errors(names, (out.detach(), *grads))
    assert set(errors) == set(names)
    assert max(errors.values()) < 1e-12
    assert oracle.errors(["dw"], [2 * grads[1]])["dw"] == pytest.approx(1.0)


def test_a_run_reports_time_error_and_fraction(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.json"
    common = ["--cases", "tiny", "--device", device, "--path", "auto", "--peers", "eager"]
    chosen = ["--precision", "ieee", "--repeats", "2", "--quick", "--commit", "abc"]
    assert main([*common, *chosen, "--json", str(target)]) == 0
    printed = capsys.readouterr().out
    document = json.loads(target.read_text())
    assert document["environment"]["commit"] == "abc"
    assert [len(table["rows"]) for table in document["tables"]] == [3 + (device == "cuda")] * 3
    for table in document["tables"]:
        assert table["title"] in printed
        for row in table["rows"]:
            taken = row["ms (low-high)"]
            assert 0 < taken["low"] <= taken["median"] <= taken["high"]
            assert max(row["error against float64"].values()) < 1e-4
            assert re.fullmatch(r"\d+\.\d%", row["of limit"])
            assert row["extra MiB"] is None or row["extra MiB"] < 64


def test_unknown_cases_and_misplaced_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--cases", "no_such_case"])
    assert "no_such_case" in capsys.readouterr().err
    assert main(["--cases", "kernels", "--device", "cpu"]) == 2
    assert main(["--list"]) == 0
    assert set(CASES) <= set(re.findall(r"^\w+", capsys.readouterr().out, re.MULTILINE))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch", "0"],
        ["--repeats", "-3"],
        ["--seconds", "nan"],
        ["--compile-seconds", "-1"],
        ["--device", "foo"],
        ["--device", "meta"],
        ["--device", "cuda:99"],
        ["--json", "no/such/folder.json"],
    ],
    ids=" ".join,
)
def test_nonsense_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is measured, and in words that name the option."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_what_cannot_run_is_said_in_words() -> None:
    inputs = cases.make_inputs(TINY, torch.float32, CPU, seed=5)
    oracle = cases.make_oracle(TINY, inputs, gradients=False)
    implementations = [*ours(("no such path",)), *peers(("eager", "compile"), cuda=False)]
    table = compare(TINY, FLOAT32, FORWARD, implementations, inputs, oracle, options())
    ran = [row["error against float64"] != "not run" for row in table.rows]
    assert ran == [False, True, True, False, False]
    assert str(table.rows[0]["words"]).startswith("ValueError: ")
    assert "the run's 0 s for that are spent" in str(table.rows[3]["words"])
    assert any("ours no such path: not run: ValueError" in note for note in table.notes)


def test_an_allowance_interrupts_what_exceeds_it() -> None:
    allowance = Allowance(0.1)
    start = time.perf_counter()
    with pytest.raises(TimeoutError), allowance.spend():
        time.sleep(10)
    assert time.perf_counter() - start < 5
    with pytest.raises(TimeoutError), allowance.spend():
        pytest.fail("nothing may start when the allowance is spent")


def test_our_bits_do_not_depend_on_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    table = threads(TINY.with_batch(7), FLOAT32, ("auto",), options())
    assert torch.get_num_threads() == before
    assert {row["pass"] for row in table.rows} == {FORWARD, BACKWARD}
    assert all(row.get("same bits") is True for row in table.rows), table.text()


def test_training_starts_from_the_same_values(device: str) -> None:
    case = replace(TINY, batch=6)
    models = [training.classifier(case, FLOAT32, path, 3).to(device) for path in (None, "auto")]
    generator = torch.Generator(device).manual_seed(0)
    x, labels = training.volumes(case, generator)
    assert x.shape == case.input_shape
    assert labels.shape == (6,)
    torch.testing.assert_close(models[0](x), models[1](x))


def test_calls_take_turns_in_changing_order() -> None:
    order: list[str] = []
    times = time_cpu([lambda: order.append("a"), lambda: order.append("b")], 3, seconds=9.0)
    assert "".join(order) == "abbaab"
    assert len(times) == 2


def test_peak_memory_leaves_out_the_results() -> None:
    def call() -> tuple[torch.Tensor, ...]:
        temporary = torch.ones(8 << 20)
        return (temporary[: 4 << 20] + 1,)

    call()
    extra = peak_extra_bytes(call, CPU)
    if sys.platform.startswith("linux"):
        assert extra is not None
        assert 31 << 20 < extra < 36 << 20


def test_tables_align_and_markdown_rows_name_the_machine() -> None:
    table = Table("title", ("name", "ms", "empty"))
    table.rows += [{"name": "a", "ms": 1.0}, {"name": "longer", "ms": 1234.5}]
    assert table.text().splitlines()[1:] == [
        "name       ms",
        "------  -----",
        "a        1.00",
        "longer  1,234",
    ]
    header, _, *rows = table.markdown(MACHINE).splitlines()[2:]
    assert header == "| name | ms | GPU | driver | torch | cuDNN | CUDA | commit | date |"
    assert rows[0] == "| a | 1.00 | H0 | 1.2 | 9.9 | 8.8 | 7.7 | abc | 2000-01-01 |"
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (False, "NO"),
        (0.25, "0.250"),
        (25.04, "25.0"),
        (Time(0.5, 0.25, 100.4), "0.500 (0.250-100)"),
        ({"dx": 1.25e-7, "dw": 2e-7}, "dx 1.2e-07 dw 2.0e-07"),
    ],
)
def test_cells_are_shown_to_three_digits(value: object, text: str) -> None:
    assert show(value) == text  # type: ignore[arg-type]

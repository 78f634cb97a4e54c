"""PyTorch's global settings decide nothing, are never a hindrance, and are left as they were."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import Case, assert_same_bits, ours

from convnormpool import conv_norm_pool, explain

CASE = Case("settings", (3, 4, 5, 8, 9), 16, (3, 2, 3), 4, padding=(1, 0, 1))

KEYS = [
    ("generic", "all"), ("cuda", "all"), ("cuda", "conv"), ("cuda", "rnn"), ("cuda", "matmul"),
    ("mkldnn", "all"), ("mkldnn", "conv"), ("mkldnn", "rnn"), ("mkldnn", "matmul"),
]  # fmt: skip


def snapshot() -> dict[str, object]:
    state: dict[str, object] = {
        ".".join(key): torch._C._get_fp32_precision_getter(*key) for key in KEYS
    }
    state["deterministic"] = torch._C._get_cudnn_deterministic()
    state["benchmark"] = torch._C._get_cudnn_benchmark()
    state["threads"] = torch.get_num_threads()
    return state


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Each test gives back the defaults of a fresh process."""
    before = snapshot()
    yield
    torch.set_float32_matmul_precision("highest")  # the older interface keeps a record of its own
    for key in KEYS:
        value = before[".".join(key)]
        torch._C._set_fp32_precision_setter(*key, value)
    torch.backends.cudnn.deterministic = bool(before["deterministic"])
    torch.backends.cudnn.benchmark = bool(before["benchmark"])


def medium() -> None:
    torch.set_float32_matmul_precision("medium")


def everything_low() -> None:
    torch.backends.fp32_precision = "bf16" if not torch.cuda.is_available() else "tf32"


def mkldnn_bf16() -> None:
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def cudnn_tf32() -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"


def cudnn_ieee() -> None:
    torch.backends.cudnn.conv.fp32_precision = "ieee"


def autotuned() -> None:
    torch.backends.cudnn.benchmark = True


SETTINGS = (medium, everything_low, mkldnn_bf16, cudnn_tf32, cudnn_ieee, autotuned)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda f: f.__name__)
def test_settings_decide_nothing(setting: Callable[[], None], device: str, any_path: str) -> None:
    """The same bits under any of them, forward and backward, and the setting stays as it is."""
    tensors = CASE.tensors(torch.float32, device)
    grad_out = CASE.grad_out(torch.float32, device)
    wanted = ours(CASE, tensors, grad_out, path=any_path)
    setting()
    state = snapshot()
    found = ours(CASE, tensors, grad_out, path=any_path)
    assert snapshot() == state
    if any_path == "eager":  # as accurate, by whatever kernel
        for a, b in zip(found, wanted, strict=True):
            assert a is not None and b is not None
            assert (a - b).norm() <= 1e-5 * b.norm()
    else:
        assert_same_bits(found, wanted)


def test_row_reading_allow_tf32_raises(device: str, any_path: str) -> None:
    """Once conv.fp32_precision was set "ieee", reading allow_tf32 may raise: never from here."""
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    tensors = CASE.tensors(torch.float32, device)
    grad_out = CASE.grad_out(torch.float32, device)
    for precision in ("ieee", "tf32"):
        found = ours(CASE, tensors, grad_out, path=any_path, fp32_precision=precision)
        assert all(t is not None and t.isfinite().all() for t in found)
    assert torch.backends.cudnn.conv.fp32_precision == "ieee"


def test_inherited_settings_stay_inherited(device: str) -> None:
    """A call in between does not pin what the user left to follow the backend's setting."""
    tensors = CASE.tensors(torch.float32, device)
    grad_out = CASE.grad_out(torch.float32, device)
    low = "bf16" if device == "cpu" else "tf32"
    backend = torch.backends.mkldnn if device == "cpu" else torch.backends.cudnn
    backend.fp32_precision = low
    inherited = backend.conv.fp32_precision
    for _ in range(2):
        ours(CASE, tensors, grad_out, path="two_stage")
    assert backend.conv.fp32_precision == inherited
    backend.fp32_precision = "ieee"
    plain = backend.conv.fp32_precision
    backend.fp32_precision = low
    ours(CASE, tensors, grad_out, path="two_stage")
    backend.fp32_precision = "ieee"
    assert backend.conv.fp32_precision == plain


def test_settings_survive_an_error(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the middle of a backward leaves them alone, too."""
    from convnormpool import _two_stage

    def broken(*_: object) -> None:
        raise MemoryError("none left")

    tensors = [t.requires_grad_() for t in CASE.tensors(torch.float32, device) if t is not None]
    out = CASE.call(conv_norm_pool, tensors, path="two_stage")
    state = snapshot()
    monkeypatch.setattr(_two_stage, "_piece_grads", broken)
    with pytest.raises(MemoryError, match="none left"):
        out.sum().backward()
    assert snapshot() == state


def test_grad_mode_and_inference_mode(device: str, path: str) -> None:
    tensors = CASE.tensors(torch.float32, device)
    wanted = CASE.call(conv_norm_pool, tensors, path=path)
    with torch.inference_mode():
        found = CASE.call(conv_norm_pool, tensors, path=path)
    assert_same_bits([found.clone()], [wanted])
    assert torch.is_grad_enabled()


def test_deterministic_algorithms(device: str, path: str) -> None:
    """Nothing here is refused by torch.use_deterministic_algorithms."""
    tensors = CASE.tensors(torch.float32, device)
    grad_out = CASE.grad_out(torch.float32, device)
    torch.use_deterministic_algorithms(True)
    try:
        ours(CASE, tensors, grad_out, path=path)
    finally:
        torch.use_deterministic_algorithms(False)


def test_environment_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONVNORMPOOL_PATH replaces "auto" and nothing else; a wrong word in it is an error."""
    x, w, *_ = CASE.tensors(torch.float32, "cpu")
    assert x is not None and w is not None
    monkeypatch.setenv("CONVNORMPOOL_PATH", "eager")
    assert explain(w, x).path == "eager"
    assert explain(w, x, path="two_stage").path == "two_stage"
    monkeypatch.setitem(os.environ, "CONVNORMPOOL_PATH", "quick")
    with pytest.raises(ValueError, match="CONVNORMPOOL_PATH"):
        conv_norm_pool(x, w, num_groups=4)

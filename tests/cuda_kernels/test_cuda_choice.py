"""Whether a device has kernels: the choice, its reasons, and that whatever fails is one warning and torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cuda_host import Library, build, compiled_kernels, library, stand_in
from dspark import DSparkDecoder, SamplingParams, _core
from dspark.errors import KernelError
from dspark.kernels import KernelWarning, choose, find_nvrtc, prepare, stream

CPU = torch.device("cpu")
NOTHING = Path("/nowhere/libcuda.so.1")


@pytest.fixture
def driver() -> Iterator[Library]:
    with stand_in(compiled_kernels()) as made:
        yield made


def fake_nvrtc() -> Path:
    source = Path(__file__).parent / "nvrtc.cpp"
    return build([source], shared=True, name="libnvrtc-fake")


def reason(match: str) -> str:
    """Why the CPU has no kernels, said in one warning; a second look is silent."""
    with pytest.warns(KernelWarning, match=match) as said:
        assert choose(CPU).kernels is None
    assert len(said) == 1 and "torch's operations are used" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = choose(CPU).reason
    assert found is not None and found in str(said[0].message)
    return found


def test_a_cpu_has_none_and_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(CPU).kernels is None
        assert choose(CPU).reason == "the device is cpu"
    assert stream(CPU) == 0


def test_a_stand_in_for_the_driver_is_a_device(driver: Library) -> None:
    kernels = choose(CPU).kernels
    assert kernels is not None and choose(CPU).kernels is kernels
    assert (kernels.architecture, kernels.name) == ("sm_90a", "stand-in on the host")
    before = driver.launches("probe")
    out = torch.zeros(192, dtype=torch.int64)
    kernels.probe(out.data_ptr(), 3, -7, stream(CPU))
    assert out.tolist() == list(range(-7, 185)) and driver.launches("probe") == before + 1


def test_kernels_can_be_switched_off(driver: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_KERNELS", "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(CPU).kernels is None and choose(CPU).reason == "DSPARK_KERNELS is off"


@pytest.mark.parametrize(
    ("number", "name"), [("80", "sm_80"), ("89", "sm_89"), ("100", "sm_100a"), ("120", "sm_120")]
)
def test_kernels_are_compiled_for_the_device_that_is_there(number: str, name: str) -> None:
    with stand_in(compiled_kernels(), DSPARK_STANDIN_ARCH=number):
        kernels = choose_anew()
        assert kernels.architecture == name == _core.kernel_architecture(int(number))


@pytest.mark.parametrize(("number", "name"), [("82", "sm_80"), ("99", "sm_90"), ("109", "sm_103")])
def test_a_device_that_nvrtc_does_not_know_gets_what_it_runs(number: str, name: str) -> None:
    """The newest of the same major version, without what is that version's alone."""
    with stand_in(compiled_kernels(), DSPARK_STANDIN_ARCH=number) as driver:
        kernels = choose_anew()
        assert kernels.architecture == name
        out = torch.zeros(64, dtype=torch.int64)
        kernels.probe(out.data_ptr(), 1, 3, 0)
        assert out[0] == 3 and driver.launches("probe") > 0


def choose_anew() -> _core.Kernels:
    return _core.Kernels(str(library().path), find_nvrtc(), str(compiled_kernels()), 0)


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        ("75", "has compute capability 7.5, but the kernels need at least 8.0"),
        ("190", "does not support sm_190"),
    ],
)
def test_a_device_that_is_too_old_or_too_new(number: str, sentence: str) -> None:
    with stand_in(compiled_kernels(), DSPARK_STANDIN_ARCH=number), pytest.raises(KernelError, match=sentence):
        choose_anew()


def test_a_missing_driver_is_one_warning_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_CUDA_DRIVER", str(NOTHING))
    assert "the CUDA driver cannot be loaded from /nowhere/libcuda.so.1" in reason("libcuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said above
        with DSparkDecoder.from_pretrained("tiny", "tiny-draft", device="cpu", policy="fixed") as decoder:
            found = decoder.info()["kernels"]
            assert found["compiled for"].startswith("none: the CUDA driver cannot be loaded")
            assert all("libcuda" in found[role] for role in ("attention", "recurrence", "sampling"))
            result = decoder.generate("import os\n", SamplingParams(max_tokens=4, temperature=0.0))
            assert len(result.token_ids) == 4


def test_a_library_that_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_CUDA_DRIVER", str(fake_nvrtc()))
    assert reason("has no function").endswith("has no function cuInit")


def test_a_missing_nvrtc_is_one_warning(driver: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_NVRTC", "/nowhere/libnvrtc.so.13")
    assert "NVRTC cannot be loaded from /nowhere/libnvrtc.so.13" in reason("NVRTC")


def test_a_torch_without_nvrtc(driver: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSPARK_KERNEL_CACHE", str(tmp_path))  # a choice of its own
    monkeypatch.setattr("dspark.kernels.nvrtc._loaded", lambda: None)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    assert "does not ship NVRTC" in reason("NVRTC")


NVRTC_STEPS = {
    "nvrtcVersion": "nvrtcVersion returned NVRTC_ERROR_COMPILATION",
    "nvrtcGetNumSupportedArchs": "nvrtcGetNumSupportedArchs returned",
    "nvrtcGetSupportedArchs": "nvrtcGetSupportedArchs returned",
    "nvrtcCreateProgram": "nvrtcCreateProgram returned",
    "nvrtcCompileProgram": "probe do not compile for sm_90a: device.cuh(1): error: planted of more than one",
    "nvrtcGetProgramLogSize": "nvrtcGetProgramLogSize returned",
    "nvrtcGetProgramLog": "nvrtcGetProgramLog returned",
    "nvrtcGetCUBINSize": "nvrtcGetCUBINSize returned",
    "nvrtcGetCUBIN": "nvrtcGetCUBIN returned",
    "nothing": "cuModuleLoadData returned CUDA_ERROR_INVALID_IMAGE",
}


@pytest.mark.parametrize("step", NVRTC_STEPS)
def test_whatever_fails_in_nvrtc_is_one_warning(
    step: str, driver: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DSPARK_NVRTC", str(fake_nvrtc()))
    monkeypatch.setenv("DSPARK_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("FAKE_NVRTC_FAIL", step)
    assert NVRTC_STEPS[step] in reason("no CUDA kernels on cpu")


DRIVER_STEPS = (
    "cuInit",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuLaunchKernel",
)
HARMLESS = ("cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2", "cuModuleUnload")


@pytest.mark.parametrize("function", DRIVER_STEPS)
def test_every_call_of_the_driver_may_fail(
    function: str, driver: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At each of its calls in turn: one warning that names call and code, no crash, and the next try
    works."""
    kernels = choose_anew()
    out = torch.zeros(64, dtype=torch.int64)
    kernels.probe(out.data_ptr(), 1, 0, 0)
    calls = driver.calls(function)
    assert calls > 0
    for number in range(1, calls + 1):
        monkeypatch.setenv("DSPARK_STANDIN_FAIL", f"{function}:{number}:2")
        link = tmp_path / f"{number}"  # a choice of its own, with what is compiled
        link.symlink_to(compiled_kernels())
        monkeypatch.setenv("DSPARK_KERNEL_CACHE", str(link))
        assert f"{function} returned CUDA_ERROR_OUT_OF_MEMORY" in reason(function)
    assert choose_anew().architecture == "sm_90a"


@pytest.mark.parametrize("function", HARMLESS)
def test_a_failure_to_tidy_up_is_none(
    function: str, driver: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPARK_STANDIN_FAIL", f"{function}:1:1")
    for _ in range(2):
        kernels = choose_anew()
        out = torch.zeros(64, dtype=torch.int64)
        kernels.probe(out.data_ptr(), 1, 1, 0)
        assert out[0] == 1
        del kernels
    if function == "cuModuleUnload":  # what did not load whole is unloaded
        monkeypatch.setenv("DSPARK_STANDIN_FAIL", "cuModuleGetFunction:1:500")
        with pytest.raises(KernelError, match="CUDA_ERROR_NOT_FOUND"):
            choose_anew().probe(0, 1, 1, 0)
    assert driver.calls(function) > 0


def test_an_error_without_words_is_still_said(driver: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = choose_anew()
    kernels.prepare(["probe"])
    monkeypatch.setenv("DSPARK_STANDIN_FAIL", "cuLaunchKernel:1:9999")
    with pytest.raises(KernelError, match=r"launching kernel probe: cuLaunchKernel returned error 9999$"):
        kernels.probe(0, 1, 1, 0)


def test_a_kernel_that_cannot_be_prepared_is_one_warning(
    driver: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = choose_anew()
    assert prepare(kernels, "attention", ["probe"]) is None
    with pytest.warns(
        KernelWarning, match="no CUDA kernels for attention, so torch's operations are used: there is no"
    ):
        assert prepare(kernels, "attention", ["nobody"]) == "there is no kernel nobody"


def test_a_kernel_whose_work_torch_does_not_see(
    driver: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DSPARK_KERNEL_CACHE", str(tmp_path))
    zeros = torch.zeros

    def elsewhere(*size: int, **options: object) -> torch.Tensor:
        class Elsewhere(torch.Tensor):
            def data_ptr(self) -> int:
                return away.data_ptr()

        return zeros(*size, **options).as_subclass(Elsewhere)  # type: ignore[call-overload,no-any-return]

    away = zeros(128, dtype=torch.int64)
    monkeypatch.setattr(torch, "zeros", elsewhere)
    assert "torch does not see what it wrote" in reason("does not see")


def test_torchs_operations_are_not_promised_where_they_fail_too(
    driver: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fault on the device shows when torch looks, and from then on every operation fails."""
    monkeypatch.setenv("DSPARK_KERNEL_CACHE", str(tmp_path))

    class Lost(torch.Tensor):
        def tolist(self) -> list[int]:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    zeros = torch.zeros
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(torch, "zeros", lambda *size, **options: zeros(*size, **options).as_subclass(Lost))
        with pytest.raises(KernelError, match=r"nor torch's operations work on cpu .*illegal memory access"):
            choose(CPU)
    assert choose(CPU).kernels is not None  # nothing was kept


def test_what_the_emulation_says_of_a_launch_reaches_the_user(driver: Library) -> None:
    kernels = choose_anew()
    with pytest.raises(KernelError, match="a grid of 0 x 1 x 1 blocks"):
        kernels.probe(0, 0, 1, 0)

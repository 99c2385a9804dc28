"""The device of a run, its hardware and its precision."""

import platform
import re
import subprocess
from functools import cache
from pathlib import Path

import torch

from bnrnn.errors import BnrnnError


def set_precision(name: str, device: torch.device) -> None:
    """Set the precision of float32 matrix products. For bfloat16, the training loop turns autocast on instead.

    Raises BnrnnError for an unknown precision, and for tf32 without a GPU.
    """
    if name not in ("float32", "tf32", "bfloat16"):
        raise BnrnnError(f"precision={name} is unknown: use float32, tf32 or bfloat16")
    if name == "tf32" and device.type != "cuda":
        raise BnrnnError(f"precision=tf32 needs a GPU, but the device is {device}: use float32 or bfloat16")
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")


def choose_device(name: str) -> torch.device:
    """The device of a run; auto selects the GPU if there is one. Raises BnrnnError for a device that does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(name, str) or re.fullmatch(r"(cpu|cuda)(:\d+)?", name) is None:
        raise BnrnnError(f"device={name} is unknown: use auto, cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BnrnnError(f"device={name} needs a GPU, but torch {torch.__version__} finds none: use device=cpu")
    return torch.device(name)


def expected_device() -> str:
    """The kind of device that `choose_device` selects for "auto", cuda or cpu, without initializing CUDA.

    CUDA cannot be used in a process that is forked from one that has initialized it, as torch.cuda.is_available() does.
    Here the driver's management library counts the GPUs.
    """
    return "cuda" if torch.cuda.device_count() else "cpu"


def hardware(device: torch.device) -> str:
    """The name of the GPU, or of the processor as in `x86_64 (AMD EPYC, AVX512)`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


@cache
def _processor() -> str:
    """The architecture, the name of the processor and the widest instruction set that torch uses on it."""
    machine = platform.machine()
    details = [processor_name(), torch.backends.cpu.get_cpu_capability()]
    details = [detail for detail in details if detail not in ("", machine, "DEFAULT")]  # DEFAULT: no wider set is used
    return f"{machine} ({', '.join(details)})" if details else machine


def processor_name() -> str:
    """The name of the processor; what Python knows, which may be nothing, on systems that do not tell the name."""
    try:
        if platform.system() == "Linux":
            return named_in(Path("/proc/cpuinfo").read_text()) or platform.processor()
        if platform.system() == "Darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return shortened(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        pass
    return platform.processor()


def named_in(cpuinfo: str) -> str:
    """The first "model name" in the text of /proc/cpuinfo, shortened; empty if there is none, or if it is unknown."""
    found = re.search(r"^model name[ \t]*:(.*)$", cpuinfo, re.MULTILINE)
    return shortened(found[1]) if found and found[1].strip() != "unknown" else ""


def shortened(name: str) -> str:
    """The name of a processor without what is not needed to recognize it: names stand in titles of figures.

    The clock rate is kept if there is no model number before it.
    """
    words = re.sub(r"\((R|TM)\)|\bCPU\b|\b[\w-]+-Core\b|\bProcessor\b", " ", name).split()
    return re.sub(r"(\d\w*) @ .*", r"\1", " ".join(words))

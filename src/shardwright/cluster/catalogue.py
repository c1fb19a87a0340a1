"""The devices and links that have a name.

Peaks are the vendors' public numbers: dense, without sparsity, of the variant for servers (SXM or OAM, where there
is one). Memory is what the driver leaves to a program, a little less than the label says. Bandwidths of links
are of **one device in one direction**, half of what vendors print, who add both directions up.

What is reached of a peak is an assumption. All assumptions about devices stand in `ASSUMED`, those about
links beside them, as `efficiency` and `latency`. `shardwright calibrate` puts measurements in their place.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ClusterError
from .curve import ramp
from .device import USUAL_OVERLAP, AttentionPrice, Device, Efficiency
from .link import Link

GIB, GIGA, TERA, MICRO = 1024**3, 1e9, 1e12, 1e-6


@dataclass(frozen=True, slots=True)
class AssumedEfficiency:
    """What long kernels reach of the peak, and the time that it takes to start one."""

    matmul: float  # of the flops: large products under a lasting load (clocks fall, more so on later devices)
    attention: float  # of the flops: fused attention, forward, of long sequences without a mask
    memory: float  # of the memory's bandwidth: copies and pointwise ops, norms and the like, mostly of 16 bits
    start: float  # seconds until a kernel is at half of its rate: launch, ramp-up and tail
    edge: float  # the smallest side of a product that halves its rate: about a tile, and the filling of its pipeline


# Matmul: a part of what mamf-finder (stas00/ml-engineering) found with the best shapes: A100 0.86, H100 0.80, B200
# 0.78, MI250X 0.77, MI300X 0.60. That long runs reach 0.9 of it on an A100 and 0.8 on an H100, as well as memory and
# edge, was fitted to published throughputs of training; docs/cost-model.md says how well they hold.
# Attention: the same part of what benchmarks of kernels found: 0.73 of an A100 (the paper of flash attention 2), 0.66
# of an H100 (that of flash attention 3; 0.61 by cuDNN), 0.74 of a B200 (Dao-AILab/flash-attention, pull request 2605).
# The others are by analogy, untested.
ASSUMED = {
    "V100": AssumedEfficiency(
        0.75, 0.30, 0.75, 5 * MICRO, 128
    ),  # no flash attention for it in torch; tiles are smaller
    "A100": AssumedEfficiency(0.77, 0.66, 0.70, 5 * MICRO, 192),
    "H100": AssumedEfficiency(0.64, 0.50, 0.70, 5 * MICRO, 192),
    "B200": AssumedEfficiency(0.62, 0.60, 0.70, 5 * MICRO, 256),  # and GB200, GB300
    "MI250": AssumedEfficiency(0.60, 0.40, 0.65, 8 * MICRO, 192),
    "MI300X": AssumedEfficiency(0.50, 0.35, 0.65, 8 * MICRO, 256),
    "MI355X": AssumedEfficiency(0.50, 0.35, 0.65, 8 * MICRO, 256),
    "TPU": AssumedEfficiency(0.65, 0.40, 0.75, 5 * MICRO, 128),  # systolic arrays of 128, or 256 in v6e
    "L40S": AssumedEfficiency(0.65, 0.55, 0.75, 5 * MICRO, 128),  # 350 W do not last for the peak
    "cpu": AssumedEfficiency(0.70, 0.30, 0.60, 10 * MICRO, 16),
}

# From the figures of the papers, heads of 128, 512 to 16,384 tokens on an H100: flash attention 2 goes from 191 to 335
# TFLOP/s if causal, from 309 to 370 if not, its backward from 214 to 322; flash attention 3 from 292 to 616, 467 to 648
# and 316 to 561. A mask as a tensor is for the kernel before them, 1.6 times as slow as flash attention 2.
FLASH_2 = AttentionPrice(short=90, causal=0.91, diagonal=220, backward=0.87, ramp=160, masked=1.6)
FLASH_3 = AttentionPrice(short=170, causal=0.96, diagonal=250, backward=0.87, ramp=160, masked=2.8)
KERNELS = {
    "A100": FLASH_2, "H100": FLASH_3, "B200": FLASH_3, "L40S": FLASH_2, "MI250": FLASH_2, "MI300X": FLASH_2,
    "MI355X": FLASH_2,
}  # fmt: skip

COLLECTIVE_BLOCKS = 24
"""Processors that a collective of NCCL takes from the kernels that run meanwhile: its thread blocks, as profiles of an
all_gather beside matmuls on an H100 show them (forums.developer.nvidia.com, topic 337991)."""

# Streaming multiprocessors or compute units, by the vendors
PROCESSORS = {
    "V100": 80, "A100": 108, "H100": 132, "B200": 148, "MI250": 104, "MI300X": 304, "MI355X": 256, "L40S": 142,
}  # fmt: skip

OVERLAPS = {"TPU": 1.0}
"""Devices whose links copy by themselves, and take from kernels nothing but the bandwidth of the memory."""


def _device(name: str, assumed: str, memory: float, bandwidth: float, **flops: float) -> Device:
    """Memory in GiB, bandwidth in GB/s, flops by dtype in units of 1e12 per second."""
    peaks = tuple((dtype, peak * TERA) for dtype, peak in flops.items())
    return Device(
        name=name,
        flops=peaks,
        memory=int(memory * GIB),
        bandwidth=bandwidth * GIGA,
        efficiency=curves(ASSUMED[assumed], peaks, bandwidth * GIGA),
        edge=ASSUMED[assumed].edge,
        attention=KERNELS.get(assumed, AttentionPrice()),
        overlap=1 - COLLECTIVE_BLOCKS / PROCESSORS[assumed]
        if assumed in PROCESSORS
        else OVERLAPS.get(assumed, USUAL_OVERLAP),
    )


def curves(
    reached: AssumedEfficiency, flops: tuple[tuple[str, float], ...], bandwidth: float
) -> tuple[Efficiency, ...]:
    """The efficiencies that follow from what is assumed, for a device with these peaks."""
    efficiency = []
    for dtype, peak in flops:
        for kind, part in (("matmul", reached.matmul), ("attention", reached.attention)):
            curve = ramp(part, peak * part * reached.start)
            efficiency.append(Efficiency(kind=kind, dtype=dtype, curve=curve))  # type: ignore[arg-type]
    moving = ramp(reached.memory, bandwidth * reached.memory * reached.start)
    return (*efficiency, Efficiency(kind="pointwise", curve=moving), Efficiency(kind="copy", curve=moving))


# tfloat32 is what float32 products use where torch.backends.cuda.matmul.fp32_precision = "tf32" lets them. Volta has
# no bfloat16 units and computes as in float32. float64 is that of the matrix units, where they have it.
_VOLTA = {"float16": 125.0, "bfloat16": 15.7, "float32": 15.7, "float64": 7.8}
_AMPERE = {"bfloat16": 312.0, "float16": 312.0, "tfloat32": 156.0, "float32": 19.5, "float64": 19.5}
_HOPPER = {"float8": 1979.0, "bfloat16": 989.0, "float16": 989.0, "tfloat32": 495.0, "float32": 67.0, "float64": 67.0}
_BLACKWELL = {
    "float8": 4500.0, "bfloat16": 2250.0, "float16": 2250.0, "tfloat32": 1125.0, "float32": 75.0, "float64": 37.0,
}  # fmt: skip
# GB200 and GB300 NVL72: a 72nd of the rack's peaks, and half of what is printed with sparsity (NVIDIA's pages of both)
_GRACE_BLACKWELL = {
    "float8": 5000.0, "bfloat16": 2500.0, "float16": 2500.0, "tfloat32": 1250.0, "float32": 80.0, "float64": 40.0,
}  # fmt: skip
_BLACKWELL_ULTRA = {**_GRACE_BLACKWELL, "float64": 1.3}
_ADA = {"float8": 733.0, "bfloat16": 362.0, "float16": 362.0, "tfloat32": 183.0, "float32": 91.6, "float64": 1.4}
# A device is one of the two dies (GCDs) of an MI250, since torch sees them so: 8 devices are 4 modules.
_CDNA2_DIE = {"bfloat16": 181.0, "float16": 181.0, "float32": 45.3, "float64": 45.3}
_CDNA3 = {
    "float8": 2615.0, "bfloat16": 1307.0, "float16": 1307.0, "tfloat32": 653.7, "float32": 163.4, "float64": 163.4,
}  # fmt: skip
_CDNA4 = {  # AMD's data sheet of the MI355X; there is no tfloat32 any more
    "float8": 5033.0, "bfloat16": 2517.0, "float16": 2517.0, "float32": 157.3, "float64": 78.6,
}  # fmt: skip


def _tpu(bfloat16: float) -> dict[str, float]:
    """A TPU multiplies in bfloat16; float32 takes six such products."""
    return {"bfloat16": bfloat16, "float32": bfloat16 / 6}


DEVICES = {
    device.name: device
    for device in (
        _device("V100-16GB", "V100", 15.7, 900, **_VOLTA),  # SXM2, HBM2
        _device("V100-32GB", "V100", 31.7, 900, **_VOLTA),
        _device("A100-40GB", "A100", 39.4, 1555, **_AMPERE),  # SXM4, HBM2
        _device("A100-80GB", "A100", 79.1, 2039, **_AMPERE),  # SXM4, HBM2e
        _device("H100", "H100", 79.1, 3350, **_HOPPER),  # SXM5, 80 GB of HBM3
        _device("H200", "H100", 139.8, 4800, **_HOPPER),  # SXM5, 141 GB of HBM3e
        _device("B200", "B200", 178.3, 8000, **_BLACKWELL),  # in HGX and DGX B200, 180 GB of HBM3e
        _device("GB200", "B200", 184, 8000, **_GRACE_BLACKWELL),  # in GB200 NVL72, 186 GB of HBM3e
        _device("GB300", "B200", 277, 8000, **_BLACKWELL_ULTRA),  # in GB300 NVL72, 288 GB of HBM3e
        _device("MI250", "MI250", 63.9, 1638, **_CDNA2_DIE),  # one die: 64 of the 128 GB of HBM2e
        _device("MI300X", "MI300X", 191.9, 5300, **_CDNA3),  # OAM, 192 GB of HBM3
        _device("MI355X", "MI355X", 287.9, 8000, **_CDNA4),  # OAM, 288 GB of HBM3E
        # Google's pages of Cloud TPU; memory is 16, 95 and 32 GB
        _device("TPU-v5e", "TPU", 14.9, 800, **_tpu(197.0)),
        _device("TPU-v5p", "TPU", 88.4, 2765, **_tpu(459.0)),
        _device("TPU-v6e", "TPU", 29.8, 1600, **_tpu(918.0)),
        _device("L40S", "L40S", 44.4, 864, **_ADA),  # 48 GB of GDDR6 with ECC
        # One process with one thread on a server; a guess that `calibrate` should replace.
        _device("cpu", "cpu", 8, 10, float32=0.08, float64=0.04, bfloat16=0.01, float16=0.01),
    )
}

ALIASES = {
    "h100-80gb": "H100", "h200-141gb": "H200", "b200-180gb": "B200", "mi300x-192gb": "MI300X", "l40s-48gb": "L40S",
}  # fmt: skip

# Links inside of a node. With a switch a device reaches any other with all it has; without, `pair` is one wire.
LINKS = {
    link.name: link
    for link in (
        # 6 links of 25 GB/s to 4 neighbours (DGX-1, no switch): "300 GB/s"
        Link(name="nvlink-2", bandwidth=150 * GIGA, pair=25 * GIGA, latency=3 * MICRO, efficiency=0.80),
        # 12 links of 25 GB/s to a switch: "600 GB/s"
        Link(name="nvlink-3", bandwidth=300 * GIGA, latency=2.5 * MICRO, efficiency=0.78),
        # 18 links of 25 GB/s to a switch: "900 GB/s"
        Link(name="nvlink-4", bandwidth=450 * GIGA, latency=2.5 * MICRO, efficiency=0.80),
        # 18 links of 50 GB/s to a switch: "1.8 TB/s"
        Link(name="nvlink-5", bandwidth=900 * GIGA, latency=2.5 * MICRO, efficiency=0.80),
        # A die of an MI250 has 50 GB/s a wire; rings go through the 2 wires that lead out of a module
        Link(name="infinity-fabric-2", bandwidth=100 * GIGA, pair=50 * GIGA, latency=4 * MICRO, efficiency=0.75),
        # 7 wires of 64 GB/s, one to each other MI300X of the node: "896 GB/s"
        Link(name="infinity-fabric-3", bandwidth=448 * GIGA, pair=64 * GIGA, latency=4 * MICRO, efficiency=0.70),
        # 7 wires of 76.8 GB/s, one to each other MI355X of the node: "1,075 GB/s"
        Link(name="infinity-fabric-4", bandwidth=537.6 * GIGA, pair=76.8 * GIGA, latency=4 * MICRO, efficiency=0.70),
        # ICI, the links of a TPU to its neighbours in a torus: 4 of 400 Gb/s, 6 of 800, 4 of 800
        Link(name="ici-v5e", bandwidth=200 * GIGA, pair=50 * GIGA, latency=1 * MICRO, efficiency=0.90),
        Link(name="ici-v5p", bandwidth=600 * GIGA, pair=100 * GIGA, latency=1 * MICRO, efficiency=0.90),
        Link(name="ici-v6e", bandwidth=400 * GIGA, pair=100 * GIGA, latency=1 * MICRO, efficiency=0.90),
        # 16 lanes; several devices share a way through the host
        Link(name="pcie-3", bandwidth=15.75 * GIGA, latency=6 * MICRO, efficiency=0.65),
        Link(name="pcie-4", bandwidth=31.5 * GIGA, latency=6 * MICRO, efficiency=0.65),
        Link(name="pcie-5", bandwidth=63 * GIGA, latency=6 * MICRO, efficiency=0.65),
        # Processes on one machine that communicate over shared memory
        Link(name="loopback", bandwidth=4 * GIGA, latency=40 * MICRO, efficiency=0.5),
    )
}


@dataclass(frozen=True, slots=True)
class Network:
    """A kind of network between nodes; the speed of an adapter comes with its name: infiniband-200 has 200 Gb/s."""

    latency: float
    efficiency: float


NETWORKS = {
    "infiniband": Network(latency=5 * MICRO, efficiency=0.90),
    "ethernet": Network(latency=15 * MICRO, efficiency=0.80),
}
NETWORK_NAME = re.compile(r"(?:(\d+)x)?([a-z]+)-(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class UsualNode:
    """The node in which a device usually comes."""

    devices: int  # 0: any number
    inside: str
    adapters: float  # for each device
    network: str


USUAL = {
    "V100-16GB": UsualNode(8, "nvlink-2", 0.5, "infiniband-100"),  # DGX-1: 4 x 100 Gb/s
    "V100-32GB": UsualNode(8, "nvlink-2", 0.5, "infiniband-100"),
    "A100-40GB": UsualNode(8, "nvlink-3", 1, "infiniband-200"),  # DGX A100: 8 x 200 Gb/s
    "A100-80GB": UsualNode(8, "nvlink-3", 1, "infiniband-200"),
    "H100": UsualNode(8, "nvlink-4", 1, "infiniband-400"),  # DGX H100: 8 x 400 Gb/s
    "H200": UsualNode(8, "nvlink-4", 1, "infiniband-400"),
    "B200": UsualNode(8, "nvlink-5", 1, "infiniband-400"),  # DGX B200: 8 x 400 Gb/s
    # One NVLink domain of 72 (NVL72) counts as a node; an adapter for each device
    "GB200": UsualNode(72, "nvlink-5", 1, "infiniband-400"),
    "GB300": UsualNode(72, "nvlink-5", 1, "infiniband-800"),
    "MI250": UsualNode(8, "infinity-fabric-2", 0.5, "infiniband-200"),  # 4 modules, an adapter each
    "MI300X": UsualNode(8, "infinity-fabric-3", 1, "ethernet-400"),
    "MI355X": UsualNode(8, "infinity-fabric-4", 1, "ethernet-400"),
    # What ICI joins counts as a node: a pod of 256, or up to 6,144 chips of a v5p. Hosts of 8 (v5p: 4) have adapters
    "TPU-v5e": UsualNode(256, "ici-v5e", 0.25, "ethernet-100"),
    "TPU-v5p": UsualNode(6144, "ici-v5p", 0.25, "ethernet-200"),
    "TPU-v6e": UsualNode(256, "ici-v6e", 0.5, "ethernet-200"),
    "L40S": UsualNode(8, "pcie-4", 0.25, "ethernet-200"),  # 2 x 200 Gb/s
    "cpu": UsualNode(0, "loopback", 0, "ethernet-10"),  # one adapter
}


def device(name: str) -> Device:
    """A device by its name, whatever the case; "A100-80" is fine too."""
    wanted = name.lower()
    for known in (wanted, wanted + "gb"):
        known = ALIASES.get(known, known).lower()
        for key, device in DEVICES.items():
            if key.lower() == known:
                return device
    sizes = [key for key in DEVICES if key.lower().startswith(wanted + "-")]
    if sizes:
        raise ClusterError(f"{name} comes in several kinds: {' or '.join(sizes)}")
    raise unknown("device", name, DEVICES)


def matching(name: str, memory: int) -> Device | None:
    """The device whose name is in what a driver calls a GPU, and whose memory is nearest; None if there is none."""
    parts = name.lower().replace("-", " ").split()
    fitting = [known for key, known in DEVICES.items() if key.split("-")[0].lower() in parts]
    return min(fitting, key=lambda known: abs(known.memory - memory), default=None)


def inside(name: str) -> Link:
    """A link inside of a node by its name."""
    if name.lower() in LINKS:
        return LINKS[name.lower()]
    raise unknown("link", name, [*LINKS, *(f"{kind}-100" for kind in NETWORKS)])


def is_network(name: str) -> bool:
    """Whether a link is between nodes, by its name."""
    match = NETWORK_NAME.fullmatch(name.lower())
    return match is not None and match[2] in NETWORKS


def network(name: str, devices: int) -> Link:
    """The share that each device of a node has of its adapters: "8xinfiniband-200", or "ethernet-100" for one."""
    match = NETWORK_NAME.fullmatch(name.lower())
    if match is None or match[2] not in NETWORKS:
        raise unknown("network", name, [f"{kind}-100" for kind in NETWORKS], "adapters of any speed in Gb/s: ")
    kind = match[2]
    adapters, speed = int(match[1] or 1), float(match[3])
    if not adapters or not speed:
        raise ClusterError(f"the network {name} carries nothing")
    analysis = NETWORKS[kind]
    plain = f"{kind}-{speed:g}"
    return Link(
        name=plain if adapters == 1 else f"{adapters}x{plain}",
        bandwidth=adapters * speed * GIGA / 8 / devices,
        latency=analysis.latency,
        efficiency=analysis.efficiency,
    )


def usual_network(name: str, devices: int) -> Link:
    """The network of a node of so many devices, if it has as many adapters for each as is usual."""
    usual = USUAL[name]
    return network(f"{max(1, round(usual.adapters * devices))}x{usual.network}", devices)


def unknown(what: str, name: str, known: Iterable[str], hint: str = "") -> ClusterError:
    """An error that names what was probably meant, and lists what there is."""
    names = {item.lower(): item for item in known}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    meant = f"did you mean {names[close[0]]}? " if close else ""
    return ClusterError(f"there is no {what} {name!r}; {meant}known are {hint}{', '.join(names.values())}")

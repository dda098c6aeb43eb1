"""What LightSeq published of training speed, beside what the model gives for the same flags: predicted, published, and why they differ."""

from __future__ import annotations

import dataclasses

GPU, PRECISION = "A100", "fp16"
ARCH, VOCAB, SENTENCE_LENGTH = "transformer_wmt_en_de_big_t2t", 32_768, 32
SOURCE = "LightSeq's training benchmark, WMT14 en-de, fp16, 8 A100, one batch per GPU of so many tokens; over fairseq, and over fairseq with apex"


@dataclasses.dataclass(frozen=True)
class Published:
    """How many times as fast as stock fairseq, and as fairseq with apex where that was published, at a batch of so many tokens."""

    layers: int  # of the encoder and of the decoder
    tokens: int
    over_stock: float
    over_apex: float | None = None

    @property
    def name(self) -> str:
        return f"{self.layers}e{self.layers}d"

    @property
    def flags(self) -> tuple[str, ...]:
        return "--encoder-layers", str(self.layers), "--decoder-layers", str(self.layers)


TABLE = (
    Published(6, 512, 3.08, 2.51),
    Published(6, 1024, 2.55),
    Published(6, 2048, 2.07),
    Published(6, 4096, 1.75, 1.53),
    Published(6, 8192, 1.58),
    Published(6, 15000, 1.53, 1.37),
    Published(24, 512, 3.46),
    Published(24, 4096, 1.74),
)

REASONS = """\
No constant was fitted to this table. What the model leaves out, or has otherwise, and which way each pulls:

1. Host time. The model charges 4 us a launch, what the device needs. fairseq in eager PyTorch spends more than that on the host for each op (Python, \
dispatch, autograd), and small batches wait for the host. Stock launches {launch_ratio:.1f} times as often as ls, and reads {stock_reads} values from the device \
in a step, each of which empties the queue, against {ls_reads}. The published gain at 512 tokens is larger for it.
2. Gradient synchronisation. The figures were measured on 8 GPUs. The all-reduce of {parameters} million 16-bit gradients, {sync_ms:.1f} ms at the least over \
NVLink (300 GB/s each way, NVIDIA's A100 data sheet), is the same for all and makes every gain smaller, that of small batches most, where nothing hides it.
3. Products at full rate. Real ones reach a part of 312 TFLOP/s, the less the smaller they are. They are the same for all, so all gains become smaller with it.
4. Kernels at full bandwidth. Stock's softmax, layer norm and reductions reach a part of it; the model credits a gain from bytes and launches alone, and none \
from better kernels. The published ratios hold such gains (LightSeq2: layer norm about 4x, softmax 2.5 to 3.4x).
5. Padding. Here all sentences are {length} tokens long. Real batches are ragged, for both sides.
6. What is compared. Stock is this machine's fairseq and torch, with attention in separate kernels as torch 1 had it. ls is this plugin and not LightSeq, which \
moves heads apart inside of its bias kernels: here torch copies them before each product of attention on a GPU. All copies together take {copies_ms:.1f} of \
{ls_ms:.1f} ms at 4,096 tokens. From there on the loss goes by blocks of tokens, which saves memory (--fused-projection auto) and adds up the weight's gradient in \
fp32 block by block. Both make the predicted gain smaller than the published one.
7. apex is its fused Adam alone. Its layer norm launches what torch's own does, and moves the same bytes.
"""

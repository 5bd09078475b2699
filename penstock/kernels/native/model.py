"""A whole dense Llama-family model in native memory, run by one C++ call per step."""

from __future__ import annotations

import ctypes
import json
import os
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.core.errors import EngineFailure, StartupError
from penstock.core.machine import usable_cpus
from penstock.kernels.native.balancing import CHANNELS, EXACT_NORM, balanced
from penstock.kernels.native.bindings import (
    KV_FORMATS,
    SCHEMES,
    CSampleCall,
    CSpec,
    CStep,
    Floats,
    Ints,
    KVFormat,
    Scheme,
    library,
)
from penstock.kernels.native.decoder_reference import ReferenceDecoder, untied
from penstock.kernels.native.packed_file import read_into, remove_leftovers, round_up
from penstock.kernels.native.sampling import NativeSampling, Scores
from penstock.kernels.native.shape import (
    ModelShape,
    checked_shapes,
    native_block_bytes,
    tensor_shapes,
    unsupported_reason,
)
from penstock.quantization.rotation import hadamard_block, split_name

LAYOUT_VERSION = 6  # of packed files; raise it whenever the order or packing of weights changes
MAGIC = b"PENSTOCK"
ALIGNMENT = 4096  # of the weights in a packed file, so that they can be mapped
PIECE = 4 * 2**20  # bytes of weights for which a packed file has a checksum

# In the order of the enum in model.h.
TENSORS = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.bias",
    "self_attn.v_proj.bias",
    "self_attn.o_proj.bias",
    "mlp.gate_proj.bias",
    "mlp.up_proj.bias",
    "mlp.down_proj.bias",
    EXACT_NORM,
    *CHANNELS,
)

SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class NativeStep:
    """Tokens of several sequences, one after the other; a list has an entry per sequence where nothing else is said."""

    tokens: Sequence[int]  # of all sequences; -1 for the last token of the sequence's row
    rows: Sequence[int]  # of the sequence, in NativeRows
    starts: Sequence[int]  # position of its first token
    counts: Sequence[int]  # of its tokens
    logit_rows: Sequence[int]  # indices of the tokens whose logits are wanted
    # Lengths of runs of logit rows. Those of a run follow one another in a sequence and are sampled in order, until a
    # token is sampled that is not the one that follows in the step (a draft). (): each row is sampled by itself.
    runs: Sequence[int] = ()
    # An entry per logit row: a token to score, -1 to sample one, or -3 to sample one before its mask is known, for
    # `resample`, which gives -3 where only the mask tells. (): all are -1.
    targets: Sequence[int] = ()
    masks: Mapping[int, Ints] = field(default_factory=dict)  # by logit row: one bit per token that may be sampled
    layers: int = 0  # so many from the first on are computed, then the final norm and the head; 0: all
    keeps_logits: bool = False  # whether `resample` may be called afterwards


@dataclass(frozen=True, slots=True)
class SampledLogits:
    """What a step would know of rows of logits that are sampled; a list has an entry for each."""

    rows: Sequence[int]  # in NativeSampling
    positions: Sequence[int]  # where the token will stand
    targets: Sequence[int] = ()
    masks: Mapping[int, Ints] = field(default_factory=dict)


class NativeRows:
    """Block tables, last tokens and adapter slots, int32 [R, M], [R] and [R], in memory that stays where it is, and how
    rows are sampled.

    A step reads them, and where it computes the logits of a sequence's last token, it leaves what it sampled there: the
    argmax, if `sampling` is None.
    """

    def __init__(
        self,
        tables_RM: Ints,
        last_token_R: Ints,
        sampling: NativeSampling | None = None,
        adapters_R: Ints | None = None,
    ) -> None:
        if tables_RM.ndim != 2 or len(tables_RM) != len(last_token_R):
            raise EngineFailure("native rows: there must be one last token for each table")
        given = [tables_RM, last_token_R, *([] if adapters_R is None else [adapters_R])]
        if not all(a.dtype == np.int32 and a.flags.c_contiguous for a in given):
            raise EngineFailure("native rows: tables, last tokens and adapters must be contiguous int32")
        self.tables_RM, self.last_token_R, self.adapters_R = tables_RM, last_token_R, adapters_R
        self.shape = tables_RM.shape
        self.sampling = sampling
        adapters_at = None if adapters_R is None else adapters_R.ctypes.data
        self.addresses = (tables_RM.ctypes.data, last_token_R.ctypes.data, sampling and sampling.address, adapters_at)


class NativeModel:
    """A model and its paged cache in native memory. Not for use by two threads at once."""

    def __init__(
        self,
        config: ModelShape,
        inverse_frequencies: npt.NDArray[np.float32],
        *,
        scheme: Scheme,
        block_size: int,
        num_blocks: int,
        threads: int | None = None,
        kv: KVFormat = "bf16",
        rope_magnitude: float = 1.0,
    ) -> None:
        if reason := unsupported_reason(config, block_size):
            raise StartupError(reason)
        self.library = library()
        self.handle: int | None = None
        self._logits = np.empty((0, config.vocab_size), dtype=np.float32)
        self.scores = Scores(config.vocab_size)  # of the last step
        self.config, self.scheme = config, scheme
        self.block_size, self.num_blocks = block_size, num_blocks
        self.block_bytes = native_block_bytes(config, block_size, kv)
        self.call_began = self.call_ended = 0.0  # of the last native step, by time.perf_counter
        spec = CSpec(
            layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            qk_norm=config.qk_norm,
            attention_bias=config.attention_bias,
            output_bias=config.output_bias,
            mlp_bias=config.mlp_bias,
            tied=config.tie_embeddings,
            scheme=SCHEMES[scheme],
            block_size=block_size,
            num_blocks=num_blocks,
            threads=threads or usable_cpus(),
            kv_format=KV_FORMATS[kv],
            hidden_transform=hadamard_block(config.hidden_size) if scheme == "int8" else 0,
            mlp_transform=hadamard_block(config.intermediate_size) if scheme == "int8" else 0,
            norm_eps=config.norm_eps,
            rope_magnitude=rope_magnitude,
        )
        self._spec, self._windows = spec, np.array(config.windows, dtype=np.int32)
        frequencies = np.ascontiguousarray(inverse_frequencies, dtype=np.float32)
        if frequencies.shape != (config.head_dim // 2,):
            raise StartupError(f"{config.head_dim // 2} rotary frequencies are needed, not {frequencies.shape}")
        self._decoder = ReferenceDecoder(config, frequencies, rope_magnitude)
        self._frequencies = frequencies
        self._allocate()

    def _allocate(self) -> None:
        """Allocate memory for all weights, zeroed, and for the KV cache."""
        self.close()
        error = ctypes.c_char_p()
        self.handle = self.library.penstock_model_new(
            ctypes.byref(self._spec),
            self._windows.ctypes.data,
            self._frequencies.ctypes.data,
            ctypes.byref(error),
        )
        if not self.handle:
            raise StartupError(f"cannot allocate the model: {(error.value or b'').decode()}")

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if getattr(self, "handle", None):
            self.library.penstock_model_free(self.handle)
            self.handle = None

    def pin_caller(self) -> None:
        """Keep the calling thread, which is to call `forward`, on a CPU of its own among the computing threads."""
        self.library.penstock_model_pin_caller(self.handle)

    @property
    def cache_bytes(self) -> int:
        """Size of the whole KV cache; memory is taken only as blocks are used."""
        return self.block_bytes * self.num_blocks

    @property
    def weight_bytes(self) -> int:
        return int(self.library.penstock_model_weight_bytes(self.handle))

    def load(self, weights: Iterator[tuple[str, Floats]]) -> None:
        """Quantise and pack a checkpoint's tensors, given in any order by their Hugging Face names.

        They may be overwritten.
        """
        shapes = tensor_shapes(self.config)
        missing = set(shapes)
        weights = checked_shapes(untied(weights) if self.config.tie_embeddings else weights, shapes)
        if self.scheme == "int8":
            weights = balanced(weights, self._decoder, shapes)
        for name, tensor in weights:
            layer, part = split_name(name)
            number = int(layer.split(".")[2]) if layer else 0
            values = np.ascontiguousarray(tensor, dtype=np.float32)
            rows, columns = values.shape if values.ndim == 2 else (values.shape[0], 1)
            problem = self.library.penstock_model_set(
                self.handle, TENSORS.index(part), number, values.ctypes.data, rows, columns
            )
            if problem:
                raise StartupError(f"tensor {name} {problem.decode()}")
            missing.discard(name)
        if missing:
            raise StartupError(f"the checkpoint lacks {len(missing)} tensors, such as {min(missing)}")

    def floats(self, name: str, layer: int, size: int) -> Floats:
        """A tensor of `CHANNELS` or of norms and biases, in native memory."""
        address = self.library.penstock_model_floats(self.handle, TENSORS.index(name), layer)
        return np.ctypeslib.as_array((ctypes.c_float * size).from_address(address))

    def save_packed(self, path: Path, fingerprint: str) -> None:
        """Write the packed weights, so that `load_packed` needs no quantising. `fingerprint` names their source."""
        header = self._header(fingerprint)
        remove_leftovers(path)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        with partial.open("wb") as file:
            file.write(MAGIC + len(header).to_bytes(8, "little") + header)
            file.seek(round_up(file.tell(), ALIGNMENT))
            file.write(self._weights())
            file.write(self._checksums(lambda begin, piece: None))
        partial.replace(path)

    def load_packed(self, path: Path, fingerprint: str) -> bool:
        """Read what `save_packed` wrote; False where the file is missing or holds other weights or another layout.

        Raises StartupError where it is damaged; the weights are those of a new model then.
        """
        expected = self._header(fingerprint)
        start = len(MAGIC) + 8
        try:
            with path.open("rb") as file:
                found = file.read(start + len(expected))
                if found != MAGIC + len(expected).to_bytes(8, "little") + expected:
                    return False
                at = round_up(len(found), ALIGNMENT)
                checksums = self._checksums(lambda begin, piece: read_into(piece, file.fileno(), at + begin))
                file.seek(at + self.weight_bytes)
                if file.read() == checksums:
                    return True
                problem = "the checksums do not match"
        except FileNotFoundError:
            return False
        except OSError as error:
            problem = error.strerror or str(error)
        self._allocate()  # padding, which loading leaves as it is, may be damaged too
        raise StartupError(f"the packed weights in {path} are damaged: {problem}")

    def _checksums(self, prepare: Callable[[int, memoryview], None]) -> bytes:
        """CRC-32 of each piece of the weights, after `prepare` was called with it; on all cores."""
        weights = self._weights()

        def checksum(begin: int) -> bytes:
            piece = weights[begin : begin + PIECE]
            prepare(begin, piece)
            return zlib.crc32(piece).to_bytes(4, "little")

        with ThreadPoolExecutor(usable_cpus()) as pool:
            return b"".join(pool.map(checksum, range(0, self.weight_bytes, PIECE)))

    def _header(self, fingerprint: str) -> bytes:
        shape = {name: getattr(self.config, name) for name in SHAPE}
        layout = {"version": LAYOUT_VERSION, "scheme": self.scheme, "bytes": self.weight_bytes}
        return json.dumps({**layout, "fingerprint": fingerprint, **shape}).encode()

    def _weights(self) -> memoryview:
        address = self.library.penstock_model_weights(self.handle)
        return memoryview((ctypes.c_uint8 * self.weight_bytes).from_address(address)).cast("B")

    def _logits_buffer(self, rows: int) -> Floats:
        """Kept from call to call: fresh memory of this size would be mapped and zeroed by the kernel each time."""
        if rows > len(self._logits):
            self._logits = np.empty((rows, self.config.vocab_size), dtype=np.float32)
        return self._logits[:rows]

    def forward(self, step: NativeStep, rows: NativeRows, *, logits: bool = True) -> tuple[Floats, list[int]]:
        """Logits of the wanted rows, [R, V], valid until the next call, and the token sampled from each; -1 where a run
        ended before it.

        Without `logits` there are only the latter. Logits of rows that want more than the argmax may have been changed.
        """
        sequences, wanted = len(step.rows), len(step.logit_rows)
        if not sequences == len(step.starts) == len(step.counts):
            raise EngineFailure("native step: rows, starts and counts must describe the same sequences")
        out = self._logits_buffer(wanted if logits else 0)
        if step.targets and len(step.targets) != wanted:
            raise EngineFailure("native step: targets must describe all logit rows")
        runs = step.runs or [1] * wanted
        inputs = (step.tokens, step.rows, step.starts, step.counts, step.logit_rows, runs, step.targets)
        # All lists in one array, with room for the answer. No numpy: in caches that a step has swept it is slow.
        values = array("i", [*chain.from_iterable(inputs), *repeat(0, wanted)])
        begin, size = values.buffer_info()[0], values.itemsize
        *inputs_at, targets_at, sampled_at = [begin + size * end for end in accumulate(map(len, inputs), initial=0)]
        masks = self._mask_addresses(step.masks, wanted) if step.masks else None
        masks_at = masks.buffer_info()[0] if masks else None
        logits_at = out.ctypes.data if logits else None
        scores_at = self.scores.reserve(wanted)
        sizes = (len(step.tokens), sequences, *rows.shape, wanted, len(runs), step.layers, step.keeps_logits)
        optional_at = (targets_at if step.targets else None, masks_at)
        call = CStep(*sizes, *inputs_at, *optional_at, *rows.addresses, logits_at, sampled_at, scores_at)
        self.call_began = time.perf_counter()
        problem = self.library.penstock_model_forward(self.handle, ctypes.byref(call))
        self.call_ended = time.perf_counter()
        if problem:
            raise EngineFailure(f"native step: {problem.decode()}")
        return out, values[len(values) - wanted :].tolist()

    def resample(self, masks: Mapping[int, Ints]) -> list[int]:
        """Sample logit rows of the last step again, each with a mask. Their logits must not have been changed by
        penalties, biases or an earlier mask."""
        rows, sampled = array("i", masks), array("i", bytes(4 * len(masks)))
        addresses = self._mask_addresses(dict(enumerate(masks.values())), len(masks))
        arrays = [values.buffer_info()[0] for values in (rows, addresses, sampled)]
        if problem := self.library.penstock_model_resample(self.handle, len(masks), *arrays):
            raise EngineFailure(f"native sampling: {problem.decode()}")
        return sampled.tolist()

    def hidden_states(self, tokens: Sequence[int]) -> Floats:
        """Final hidden states, behind the norm, of tokens of the last step, by their indices in it: [N, hidden]."""
        indices, out = array("i", tokens), np.empty((len(tokens), self.config.hidden_size), dtype=np.float32)
        self.library.penstock_model_hidden_states(self.handle, indices.buffer_info()[0], len(indices), out.ctypes.data)
        return out

    def sample(self, logits: Floats, sampling: NativeSampling, step: SampledLogits) -> list[int]:
        """Sampling by itself, for tests: one token per row of logits [N, V], which may be changed."""
        if not (logits.flags.c_contiguous and logits.shape[1:] == (self.config.vocab_size,)):
            raise EngineFailure("native sampling: logits must be contiguous rows over the vocabulary")
        inputs = [array("i", values) for values in (step.rows, step.positions, step.targets or repeat(-1, len(logits)))]
        if any(len(values) != len(logits) for values in inputs):
            raise EngineFailure("native sampling: there must be one row, position and target for each row of logits")
        if not all(0 <= row < sampling.rows for row in step.rows):
            raise EngineFailure("native sampling: rows must be rows of the sampling state")
        masks, tokens = self._mask_addresses(step.masks, len(logits)), array("i", bytes(4 * len(logits)))
        arrays = [values.buffer_info()[0] for values in (*inputs, masks, tokens)]
        call = CSampleCall(len(logits), logits.ctypes.data, *arrays, self.scores.reserve(len(logits)))
        self.library.penstock_model_sample(self.handle, sampling.address, ctypes.byref(call))
        return tokens.tolist()

    def _mask_addresses(self, masks: Mapping[int, Ints], count: int) -> array[int]:
        """Where the mask of each row of logits is, 0 for none."""
        for mask in masks.values():
            if mask.dtype != np.int32 or not mask.flags.c_contiguous or 32 * mask.size < self.config.vocab_size:
                raise EngineFailure("native step: a token mask must be contiguous int32 with a bit for every token")
        return array("Q", [masks[i].ctypes.data if i in masks else 0 for i in range(count)])

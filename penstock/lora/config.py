"""adapter_config.json of PEFT: the rank and the scale of each module, and a refusal of what would need more than that.

PEFT writes many more fields. Those that say how the adapter was trained change nothing about the result and are
ignored; those that change the computation are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from penstock.core.errors import InvalidRequest

SUPPORTED = "supported are LoRA matrices A and B of linear layers, with rank_pattern, alpha_pattern and rsLoRA"
# Fields that must be absent, null, empty, false or the value here, and what they stand for.
_REFUSED: dict[str, tuple[Any, str]] = {
    "use_dora": (False, "DoRA, whose magnitudes depend on the base weights"),
    "bias": ("none", "trained biases of the base model"),
    "lora_bias": (False, "a bias of lora_B"),
    "modules_to_save": (None, "whole modules that replace those of the base model"),
    "fan_in_fan_out": (False, "transposed weights"),
    "layer_replication": (None, "layers that are used several times"),
    "trainable_token_indices": (None, "trained token embeddings"),
    "target_parameters": (None, "parameters that are not linear layers"),
    "alora_invocation_tokens": (None, "activated LoRA, which begins within the prompt"),
    "use_qalora": (False, "QA-LoRA, which pools its input"),
    "use_bdlora": (None, "block-diagonal matrices"),
    "kasa_config": (None, "KaSA, which changes the base weights"),
    "monteclora_config": (None, "MonteCLoRA, which draws its matrices at random"),
    "arrow_config": (None, "Arrow, which mixes adapters by token"),
}
# Initialisations that subtract the adapter from the base weights. A conversion on saving sets the field to true.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
MOST_RANK = 65536
MOST_PATTERNS = 4096  # entries of rank_pattern and of alpha_pattern
# Matching a regular expression takes polynomial time, whatever the file says: few of them, short, with few repetitions
# and groups, and neither repeated groups nor lookaround nor back references.
MOST_EXPRESSIONS, MOST_EXPRESSION_CHARS, MOST_REPEATS = 64, 256, 3
_PLAIN = re.compile(r"[\w.]+")
_REFUSED_SYNTAX = re.compile(r"\)[*+{]|\(\?|\\\d")


def invalid_adapter(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_adapter")


@dataclass(frozen=True, slots=True)
class Pattern:
    """An entry of rank_pattern or alpha_pattern. It is for modules of this name, or with this end of the name after a
    dot; what is not a plain name is a regular expression."""

    text: str
    value: float
    expression: re.Pattern[str] | None

    def matches(self, module: str) -> bool:
        if self.expression is not None:
            return self.expression.match(module) is not None
        return module == self.text or module.endswith(f".{self.text}")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    rank: int
    alpha: float
    rslora: bool
    rank_pattern: tuple[Pattern, ...]
    alpha_pattern: tuple[Pattern, ...]
    target_modules: tuple[str, ...]  # as trained, for people: the tensors in the file say what is there
    base_model: str  # the name that its author knew it by

    def rank_of(self, module: str) -> int:
        return int(_first_match(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return _first_match(self.alpha_pattern, module, self.alpha) / (sqrt(rank) if self.rslora else rank)

    def identity(self) -> bytes:
        """What of it changes the result, the same for the same values."""
        patterns = [[(p.text, p.value) for p in ps] for ps in (self.rank_pattern, self.alpha_pattern)]
        return json.dumps([self.rank, self.alpha, self.rslora, *patterns]).encode()


def parse_config(raw: bytes, path: Path) -> PeftConfig:
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise invalid_adapter(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise invalid_adapter(f"{path} must hold a JSON object")
    if fields.get("peft_type") != "LORA":
        raise invalid_adapter(f"{path}: peft_type {fields.get('peft_type')!r} is not supported; supported: 'LORA'")
    for name, (harmless, meaning) in _REFUSED.items():
        if fields.get(name) and fields[name] != harmless:
            raise invalid_adapter(f"{path}: {name} {fields[name]!r} is not supported ({meaning}); {SUPPORTED}")
    initial = fields.get("init_lora_weights")
    if isinstance(initial, str) and initial.startswith(_CHANGES_BASE):
        raise invalid_adapter(
            f"{path}: init_lora_weights {initial!r} is not supported, it needs base weights that were changed before "
            "training; save the adapter with path_initial_model_for_weight_conversion"
        )
    rank: Any = fields.get("r")
    if not _whole(rank):
        raise invalid_adapter(f"{path}: r must be a whole number from 1 to {MOST_RANK}, not {rank!r}")
    alpha: Any = fields.get("lora_alpha")
    if not _number(alpha):
        raise invalid_adapter(f"{path}: lora_alpha must be a number, not {alpha!r}")
    targets = fields.get("target_modules") or []
    return PeftConfig(
        rank=rank,
        alpha=float(alpha),
        rslora=bool(fields.get("use_rslora")),
        rank_pattern=_patterns(fields, "rank_pattern", _whole, path),
        alpha_pattern=_patterns(fields, "alpha_pattern", _number, path),
        target_modules=(targets,) if isinstance(targets, str) else tuple(sorted(map(str, targets))),
        base_model=str(fields.get("base_model_name_or_path") or ""),
    )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_RANK


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e9 < value < 1e9


def _patterns(fields: dict[str, Any], name: str, valid: Callable[[Any], bool], path: Path) -> tuple[Pattern, ...]:
    found = fields.get(name) or {}
    if not isinstance(found, dict) or len(found) > MOST_PATTERNS or not all(map(valid, found.values())):
        raise invalid_adapter(f"{path}: {name} must map at most {MOST_PATTERNS} module names to numbers")
    expressions = [text for text in found if not _PLAIN.fullmatch(text)]
    if len(expressions) > MOST_EXPRESSIONS:
        raise invalid_adapter(
            f"{path}: {name} has {len(expressions)} regular expressions; supported: {MOST_EXPRESSIONS}"
        )
    compiled = {text: _expression(text, f"{path}: {name}") for text in expressions}
    return tuple(Pattern(text, float(value), compiled.get(text)) for text, value in found.items())


def _expression(text: str, where: str) -> re.Pattern[str]:
    """PEFT's rule: it matches a whole name, or the end of one after a dot."""
    repeats = sum(map(text.count, "*+?{("))
    if len(text) > MOST_EXPRESSION_CHARS or repeats > MOST_REPEATS or _REFUSED_SYNTAX.search(text):
        raise invalid_adapter(
            f"{where} has {text[:MOST_EXPRESSION_CHARS]!r}; supported: module names, and regular expressions of up to "
            f"{MOST_EXPRESSION_CHARS} characters and {MOST_REPEATS} repetitions and groups, no group repeated"
        )
    try:
        return re.compile(rf"(?:.*\.)?(?:{text})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise invalid_adapter(f"{where} has {text!r}, which is no regular expression: {error}") from error


def _first_match(patterns: tuple[Pattern, ...], module: str, otherwise: float) -> float:
    return next((pattern.value for pattern in patterns if pattern.matches(module)), otherwise)

"""An objective: loss terms with their coefficients. `Objective("ppo", clip=0.2, kl=0.01)`, or `Objective(my_loss)`.

The gradient is that of  sum over terms of coefficient * sum over tokens of weight * loss;  the weights are
token_weights'.
Terms evaluated on tokens here: the main loss (coefficient 1), kl, entropy, value. Terms evaluated inside the model,
which this
file only declares: moe_aux, moe_z (per layer, and per sample or over the batch), mtp. Unknown or unfitting options raise; none is ignored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import partial
from types import FunctionType

from torch import Tensor

from longspan.data.sample import Sample
from longspan.errors import UserError
from longspan.objective.losses import (
    KL_ESTIMATORS,
    LOSSES,
    TEACHER,
    DistillFull,
    DistillTopK,
    NoOptions,
    Options,
    Value,
    entropy_bonus,
    is_finite,
    kl_loss,
    value_loss,
)
from longspan.objective.tokens import Fields, TokenOut
from longspan.typed import typed

__all__ = ["MODEL_TERMS", "Objective", "Term", "TokenLoss"]

TokenLoss = Callable[[TokenOut, Fields], Tensor]  # [T] tensors -> [T]
MODEL_TERMS = ("moe_aux", "moe_z", "mtp")
MOE_OVER = ("sample", "batch")
OUTPUTS = ("entropy", "value", "topk_logprob", "teacher_kl")  # beside logprob
_CUSTOM = "custom"  # the term's name of a callable that has none
HEAD_OUTPUTS = ("logprob", "entropy", "topk_logprob", "teacher_kl")
TERMS = (*LOSSES, "kl", "entropy", *MODEL_TERMS)  # every name that a term has, callables aside
ENGINE_FIELDS = ("temperature", "routed_experts")  # read by the engine, never by a loss


@dataclass(frozen=True, slots=True)
class Term:
    """One term of the sum. loss/<name> is its weighted sum, without the coefficient."""

    name: str
    coefficient: float
    fn: TokenLoss | None  # None: evaluated inside the model (MODEL_TERMS)
    fields: tuple[str, ...] = ()  # sample fields that fn reads
    uses: tuple[str, ...] = ()  # what fn reads of TokenOut, segments aside
    token_wise: bool = True  # False: fn reads other tokens through segments
    clipped: Callable[[TokenOut, Fields], Tensor] | None = None  # tokens that ratio/clip_share counts

    @property
    def reads_head(self) -> bool:
        """fn depends on what the LM head computes."""
        return any(use in self.uses for use in HEAD_OUTPUTS)

    @property
    def in_head(self) -> bool:
        """head_loss can form this term chunk by chunk: it reads the head alone, and each token reads only itself."""
        return self.reads_head and self.token_wise and all(use in HEAD_OUTPUTS for use in self.uses)


@typed
@dataclass(frozen=True, slots=True, init=False)
class Objective:
    """Which losses, how strong. See losses.LOSSES for the names and losses.PPO etc. for each one's options."""

    loss: str | TokenLoss
    options: Options
    name: str  # of the main term: the loss's name, or the callable's
    kl: float  # coefficient of KL(policy || reference); needs ref_logprob
    kl_estimator: str  # "k1" | "k2" | "k3"
    entropy: float  # coefficient of the entropy bonus; positive raises the entropy
    value: float  # coefficient of the value loss; needs a value head and the field return
    value_clip: float | None  # clip of the value loss; needs old_value
    moe_aux: float  # coefficient of the routers' load-balancing loss
    moe_z: float  # coefficient of the routers' z-loss
    moe_over: str  # "sample": each sample has its own router statistics; "batch": one call is the batch
    mtp: float  # coefficient of the multi-token-prediction loss
    declared: tuple[str, ...] | None  # fields a callable reads; None: whatever all samples have
    uses: tuple[str, ...]  # what a callable reads of TokenOut beside logprob
    token_wise: bool

    def __init__(
        self,
        loss: str | TokenLoss,
        *,
        kl: float = 0.0,
        entropy: float = 0.0,
        value: float = 0.0,
        moe_aux: float = 0.0,
        moe_z: float = 0.0,
        moe_over: str = "sample",
        mtp: float = 0.0,
        kl_estimator: str = "k3",
        value_clip: float | None = None,
        name: str | None = None,
        fields: Sequence[str] | None = None,
        uses: Sequence[str] | None = None,
        token_wise: bool | None = None,
        **options: float | str | None,
    ) -> None:
        """options: those of the loss (clip, clip_high, dual_clip, beta, topk, direction). For a callable fn(out, fields) -> [T]
        only: name of its term; fields it reads (None: all that every sample has); uses: what it reads of `out` beside
        logprob, of "entropy" (default), "value", "topk_logprob", "teacher_kl" (forward); token_wise=True: it does not use
        segments, so the one-pass head may form it chunk by chunk.
        """
        put = object.__setattr__  # the dataclass is frozen
        put(self, "loss", loss)
        if isinstance(loss, str):
            _only_for_callables(loss, name=name, fields=fields, uses=uses, token_wise=token_wise)
            put(self, "options", _named_options(loss, value_clip, options))
        elif options:
            raise UserError(
                f"Objective({_name_of(loss)}) got {sorted(options)}: a callable has no options. Bind them with "
                "functools.partial."
            )
        else:
            put(self, "options", NoOptions())
        put(self, "name", loss if isinstance(loss, str) else name or _name_of(loss))
        put(self, "declared", None if fields is None else tuple(fields))
        put(self, "uses", ("logprob", *(("entropy",) if uses is None else uses)))
        put(self, "token_wise", bool(token_wise))
        numbers = {"kl": kl, "entropy": entropy, "value": value, "moe_aux": moe_aux, "moe_z": moe_z, "mtp": mtp}
        for key, number in numbers.items():
            if not is_finite(number) or (number < 0 and key != "entropy"):
                raise UserError(
                    f"Objective: {key}={number!r} must be a finite number, not negative. Use {key}=0.0 to leave the "
                    "term out."
                )
            put(self, key, float(number))
        put(self, "moe_over", moe_over)
        put(self, "kl_estimator", kl_estimator)
        put(self, "value_clip", value_clip)
        self._check()

    def _check(self) -> None:
        if self.kl_estimator not in KL_ESTIMATORS:
            raise UserError(
                f"Objective: kl_estimator={self.kl_estimator!r} is unknown. Use one of {', '.join(KL_ESTIMATORS)}."
            )
        if self.kl_estimator != "k3" and self.kl == 0:
            raise UserError(
                f"Objective: kl_estimator={self.kl_estimator!r} has no effect with kl=0.0. Give kl=, or leave it out."
            )
        if self.moe_over not in MOE_OVER:
            raise UserError(f"Objective: moe_over={self.moe_over!r} is unknown. Use one of {', '.join(MOE_OVER)}.")
        if self.moe_over == "batch" and not (self.moe_aux or self.moe_z):
            raise UserError(
                "Objective: moe_over='batch' has no effect with moe_aux=0.0 and moe_z=0.0. Give one, or leave it out."
            )
        if self.value_clip is not None and self.value == 0 and self.loss != "value":
            raise UserError(
                f"Objective: value_clip={self.value_clip!r} has no effect with value=0.0. Give value=, or leave it out."
            )
        unknown = [use for use in self.uses if use not in ("logprob", *OUTPUTS)]
        if unknown:
            raise UserError(f"Objective: uses={unknown} is unknown. Use some of {', '.join(OUTPUTS)}.")
        names = [term.name for term in self.terms]
        if len(set(names)) < len(names):
            raise UserError(
                f"Objective: two terms share a name in {names}. Drop the extra coefficient, or give the callable "
                "another name=."
            )

    @property
    def terms(self) -> tuple[Term, ...]:
        """The main loss first; terms with coefficient 0 are absent."""
        terms = [self._main()]
        if self.kl:
            terms.append(
                Term("kl", self.kl, partial(kl_loss, estimator=self.kl_estimator), ("ref_logprob",), ("logprob",))
            )
        if self.entropy:
            terms.append(Term("entropy", self.entropy, entropy_bonus, uses=("entropy",)))
        if self.value:
            options = Value(self.value_clip)
            terms.append(
                Term("value", self.value, partial(value_loss, options=options), _value_fields(options), uses=("value",))
            )
        inside = {"moe_aux": self.moe_aux, "moe_z": self.moe_z, "mtp": self.mtp}
        return (*terms, *(Term(name, inside[name], None) for name in MODEL_TERMS if inside[name]))

    def _main(self) -> Term:
        if not isinstance(self.loss, str):
            return Term(self.name, 1.0, self.loss, self.declared or (), self.uses, self.token_wise)
        entry = LOSSES[self.loss]
        needs = _value_fields(self.options) if isinstance(self.options, Value) else entry.fields
        clipped = None if entry.clipped is None else partial(entry.clipped, options=self.options)
        return Term(
            self.name, 1.0, partial(entry.fn, options=self.options), needs, entry.uses, entry.token_wise, clipped
        )

    @property
    def token_terms(self) -> tuple[Term, ...]:
        """The terms evaluated on tokens, those of objective/evaluate.py."""
        return tuple(term for term in self.terms if term.fn is not None)

    @property
    def fields(self) -> tuple[str, ...]:
        """Sample fields that the terms declare, each once. See stream_fields for a callable that declares none."""
        return tuple(dict.fromkeys(name for term in self.terms for name in term.fields))

    @property
    def needs_entropy(self) -> bool:
        return any("entropy" in term.uses for term in self.terms)

    @property
    def needs_value(self) -> bool:
        return any("value" in term.uses for term in self.terms)

    @property
    def needs_topk(self) -> bool:
        """The head must give log-probs at the field teacher_ids."""
        return any("topk_logprob" in term.uses for term in self.terms)

    @property
    def needs_teacher(self) -> bool:
        """The call needs a teacher engine's hidden states and head."""
        return any("teacher_kl" in term.uses for term in self.terms)

    @property
    def shares_routes(self) -> bool:
        """moe_aux counts recorded routes over the whole batch."""
        return self.moe_over == "batch" and bool(self.moe_aux)

    @property
    def teacher_direction(self) -> str:
        """Of TokenOut.teacher_kl; callables get the forward KL."""
        return self.options.direction if isinstance(self.options, DistillFull) else "forward"

    @property
    def one_pass(self) -> bool:
        """True: head_loss gives the same numbers as head_outputs + evaluate, with a matmul less. See Term.in_head."""
        return any(term.in_head for term in self.token_terms) and all(
            term.in_head or not term.reads_head for term in self.token_terms
        )

    def stream_fields(self, samples: Sequence[Sample]) -> tuple[str, ...]:
        """Fields to carry to the loss: the declared ones, and old_logprob for metrics where every sample has it.

        A callable without declared fields gets every field that all samples have.
        """
        common = (
            [name for name in samples[0].fields if all(name in sample.fields for sample in samples)] if samples else []
        )
        extra = [name for name in common if name == "old_logprob"]
        if not isinstance(self.loss, str) and self.declared is None:
            extra = [name for name in common if name not in ENGINE_FIELDS and not name.endswith("_mask")]
        topk = ["teacher_ids"] if self.needs_topk else []
        return tuple(dict.fromkeys([*self.fields, *topk, *extra]))

    def check(self, samples: Sequence[Sample]) -> None:
        """Raises UserError naming sample, field and loss where a required field is missing or has the wrong shape, or
        where a mask belongs to no term."""
        terms, masks = self.terms, self._mask_fields()
        for number, sample in enumerate(samples):
            _check_masks(number, sample, masks)
            for term in terms:
                for name in term.fields:
                    if name not in sample.fields:
                        raise UserError(
                            f"sample {number} has no field {name!r}, which the loss term {term.name!r} reads (it has "
                            f"{sorted(sample.fields)}). Give fields={{{name!r}: [...]}} of length {len(sample)}, 0 "
                            "where mask is 0."
                        )
                    dims = 2 if name in TEACHER else 1
                    shape = list(sample.fields[name].shape)
                    if len(shape) != dims and isinstance(self.loss, str):
                        want = "[L, K]" if dims == 2 else "[L]"
                        raise UserError(
                            f"sample {number}: field {name!r} has shape {shape}; the loss term {term.name!r} needs "
                            f"{want}."
                        )
            self._check_teacher(number, sample)

    def _mask_fields(self) -> set[str]:
        """Names ending in _mask that a sample may carry: those of this objective, and of terms that it does not use."""
        terms = dict.fromkeys([*TERMS, _CUSTOM, self.name])
        own = [name for name in self.declared or () if name.endswith("_mask")]
        return {*(f"{term}_mask" for term in terms), *own}

    def _check_teacher(self, number: int, sample: Sample) -> None:
        if self.loss != "distill_topk":
            return
        ids, logprob = (list(sample.fields[name].shape) for name in TEACHER)
        if ids != logprob:
            raise UserError(
                f"sample {number}: teacher_ids {ids} and teacher_logprob {logprob} must have the same shape [L, K]."
            )
        topk = self.options.topk if isinstance(self.options, DistillTopK) else None
        if topk is not None and topk > ids[1]:
            raise UserError(
                f"sample {number}: distill_topk has topk={topk}, but teacher_ids has {ids[1]} columns. Lower topk, or "
                "store more."
            )


def _check_masks(number: int, sample: Sample, masks: set[str]) -> None:
    unknown = [name for name in sample.fields if name.endswith("_mask") and name not in masks]
    if unknown:
        raise UserError(
            f"sample {number}: field {unknown[0]!r} is the mask of no term, so it would hide no token. Masks are "
            f"{', '.join(sorted(masks))}. Correct the name, drop the field, or name it in Objective(fn, fields=[...])."
        )


def _value_fields(options: Value) -> tuple[str, ...]:
    return ("return",) if options.clip is None else ("return", "old_value")


def _name_of(loss: TokenLoss) -> str:
    """A callable's own name where it has one that can stand in a metric's name."""
    inner = loss.func if isinstance(loss, partial) else loss
    return inner.__name__ if isinstance(inner, FunctionType) and inner.__name__.isidentifier() else _CUSTOM


def _only_for_callables(loss: str, **given: object) -> None:
    extra = sorted(name for name, value in given.items() if value is not None)
    if extra:
        raise UserError(
            f"Objective({loss!r}) got {extra}, which only a callable takes. Leave them out: a named loss knows its own."
        )


def _named_options(loss: str, value_clip: float | None, given: Mapping[str, float | str | None]) -> Options:
    """The options of a named loss; an unknown loss, or an option that it does not take, is refused by name."""
    if loss not in LOSSES:
        raise UserError(
            f"loss {loss!r} is unknown. Use one of {', '.join(LOSSES)}, or a callable fn(out, fields) -> [T]."
        )
    kind = LOSSES[loss].options
    if loss == "value" and value_clip is not None:
        if "clip" in given:
            raise UserError(
                f"Objective('value') got clip={given['clip']!r} and value_clip={value_clip!r}, two names of one setting. "
                "Give one."
            )
        given = {"clip": value_clip} | dict(given)
    takes = [field.name for field in dataclass_fields(kind)]
    wrong = sorted(set(given) - set(takes))
    if wrong:
        raise UserError(
            f"loss {loss!r} does not take {', '.join(wrong)}: its options are {', '.join(takes) if takes else 'none'} "
            "(beside kl, entropy, "
            "value, moe_aux, moe_z, moe_over, mtp and their settings). Remove the option, or choose a loss that has it."
        )
    return kind(**given)  # pyright: ignore[reportCallIssue, reportArgumentType]  (names checked above, values by the class)

"""Objectives: token weights, the fused LM head, losses, per-sample reductions, metrics. Read evaluate.py first."""

from longspan.objective.evaluate import chunk_loss, evaluate, evaluate_one_pass, record, token_losses, weighted_sum
from longspan.objective.head_loss import HeadLoss, head_loss
from longspan.objective.logprob import HeadOut, head_outputs
from longspan.objective.losses import LOSSES
from longspan.objective.objective import MODEL_TERMS, Objective, Term
from longspan.objective.segments import Segments
from longspan.objective.stats import Stats
from longspan.objective.teacher import TeacherHead, head_kl
from longspan.objective.tokens import Fields, TokenOut
from longspan.objective.weights import NORMALISE, over_batch, over_samples, term_masks, token_weights

__all__ = [
    "Fields",
    "HeadLoss",
    "HeadOut",
    "LOSSES",
    "MODEL_TERMS",
    "NORMALISE",
    "Objective",
    "Segments",
    "Stats",
    "TeacherHead",
    "Term",
    "TokenOut",
    "chunk_loss",
    "evaluate",
    "evaluate_one_pass",
    "head_kl",
    "head_loss",
    "head_outputs",
    "over_batch",
    "over_samples",
    "record",
    "term_masks",
    "token_losses",
    "token_weights",
    "weighted_sum",
]

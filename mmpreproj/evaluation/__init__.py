"""Evaluation of language models: log-likelihoods, LAMBADA, multiple choice, perplexity."""

from mmpreproj.evaluation.items import ChoiceItem, LambadaItem, read_choices, read_lambada
from mmpreproj.evaluation.scoring import Score, Scorer
from mmpreproj.evaluation.tasks import choices, lambada, perplexity, perplexity_ratio

__all__ = [
    "ChoiceItem",
    "LambadaItem",
    "Score",
    "Scorer",
    "choices",
    "lambada",
    "perplexity",
    "perplexity_ratio",
    "read_choices",
    "read_lambada",
]

"""What is read off a block's forward: where its self-attentions are, and where their skips join."""

import json
from pathlib import Path

import pytest
from helpers import FAMILIES
from helpers import tiny as timm_model
from transformers_models import CASES, TIMESFORMER
from transformers_models import tiny as transformers_model

from mmpreproj import PreProjConfig
from mmpreproj.sites import find_sites

# The sites that a table of blocks, written by hand, gave before blocks were read. One differs: in
# BEiT without LayerScale the branch is multiplied by the number 1, and the skip joins at once.
BEFORE = json.loads((Path(__file__).parent / "sites_of_071d733.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", BEFORE)
def test_what_is_read_is_what_the_table_by_hand_said(name):
    if name.startswith("timm "):
        assert name.removeprefix("timm ") in FAMILIES
        model = timm_model(name.removeprefix("timm "))
    else:
        model = transformers_model(TIMESFORMER if name == "timesformer" else CASES[name])
    found = [
        [s.block, s.attention, s.join, s.join_output, s.divisor, s.normed]
        for s in find_sites(model, PreProjConfig())
    ]
    assert found == BEFORE[name]

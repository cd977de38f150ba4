"""The card of an adapter folder, README.md: what it is, what came out, and how it is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmpreproj.files import write_whole
from mmpreproj.folders import Folder
from mmpreproj.messages import listed

__all__ = ["add_section", "run_card", "write_card"]

CARD = "README.md"
_START, _END = "<!-- mmpreproj -->", "<!-- /mmpreproj: this part is written at each save -->"


def write_card(folder: Path, held: Folder, said: Mapping[str, Any], format: str) -> None:
    """Write the card, or renew its part of one that is there: the rest is its owner's.

    Args:
        said: `license`, `data` and `figures`, as `mmpreproj.save` takes them.
        format: "mmpreproj", "peft", or "whole" where the base is in the folder too.
    """
    base, config = held.base, held.config
    added = [
        f"expansion {config.expansion:g}" if config.pre_projection else "no pre-projection",
        f"skip of {'full rank' if config.skip_rank is None else f'rank {config.skip_rank}'}"
        if config.content_skip
        else "no skip",
        f"before {'attention and MLP' if config.sites == 'both' else config.sites}",
        "all blocks" if config.layers is None else f"blocks {config.to_dict()['layers']}",
    ]
    count = sum(tensor.numel() for tensor in held.tensors.values())
    text = f"""\
What mmpreproj added to a model: a pre-projection before Q, K and V, and a skip around attention
([arXiv 2604.10791](https://arxiv.org/abs/2604.10791)).

| | |
|---|---|
| base model | {base.get("name") or "not named"} ({base.get("architecture", "?")}) |
| fingerprint of its weights | {base.get("fingerprint") or "not recorded"} |
| added | {", ".join(added)} |
| parameters of the adapter | {count:,} |
| trained besides | {", ".join(held.also) or "nothing"} |
| data | {said.get("data") or "not recorded"} |

{_figures(said.get("figures") or {})}

```python
{_loading(base, format)}
```"""
    add_section(folder, text, base.get("name"), said.get("license"), _library(format))


def run_card(data: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a card says of a run of a language model, of its data's facts and its test."""
    files = (data.get("files") or {}).get("train") or [data.get("name")]
    found = (metrics or {}).get("perplexity") or {}
    figures = {f"test perplexity per {unit}": figure for unit, figure in found.items() if figure}
    return {"data": listed(files), "figures": figures}


def add_section(
    folder: Path,
    text: str,
    base: str | None = None,
    license: str | None = None,
    library: str = "mmpreproj",
) -> None:
    """Put `text` between the marks of a card; a new card gets the hub's header, too."""
    path = folder / CARD
    section = f"{_START}\n{text}\n{_END}\n"
    if path.is_file() and not path.is_symlink():
        card = path.read_text(encoding="utf-8", errors="surrogateescape")
        marked = re.compile(f"{re.escape(_START)}.*?{re.escape(_END)}\n?", re.DOTALL)
        if marked.search(card):
            card = marked.sub(lambda _: section, card, count=1)
        else:
            header = re.match(r"---\n.*?\n---\n", card, re.DOTALL)
            place = header.end() if header else 0
            card = f"{card[:place]}\n{section}\n{card[place:]}"
    else:
        named = [f"base_model: {base}"] if base and re.fullmatch(r"[\w.-]+/[\w.-]+", base) else []
        lines = [*named, f"library_name: {library}", f"license: {license or 'unknown'}"]
        header = "\n".join(["---", *lines, "tags: [mmpreproj]", "---"])
        card = f"{header}\n\n# {os.path.basename(os.path.abspath(folder))}\n\n{section}"
    write_whole(path, card.encode(errors="surrogateescape"))


def _library(format: str) -> str:
    return "peft" if format == "peft" else "mmpreproj"


def _loading(base: Mapping[str, Any], format: str) -> str:
    if format == "peft":
        return (
            "import peft\n"
            "from mmpreproj import PreProjPeftConfig  # without it PEFT says KeyError: 'PREPROJ'\n"
            "model = peft.PeftModel.from_pretrained(base, FOLDER)  # base: the model named above\n"
            "# or without PEFT: mmpreproj.load(base, FOLDER)"
        )
    lines = ["import mmpreproj", "model = mmpreproj.from_pretrained(FOLDER)"]
    if not base.get("name") and format != "whole":
        lines.pop()
    return "\n".join([*lines, "mmpreproj.load(base, FOLDER)  # onto a base that is loaded already"])


def _figures(figures: Mapping[str, Any]) -> str:
    if not figures:
        return "No figures were recorded."
    rows = []
    for name, found in figures.items():
        known = found if isinstance(found, Mapping) else {"value": found}
        value, n = known.get("value"), known.get("n")
        value = f"{value:.4g}" if isinstance(value, float) else value
        rows.append(f"| {name} | {value} | {'not recorded' if n is None else f'{n:,}'} |")
    return "\n".join(["| figure | value | n |", "|---|---|---|", *rows])

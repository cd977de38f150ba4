"""The list of models in docs, from what families.py found.

python tests/families.py --json docs/results/families.json
python tests/models_page.py docs/results/families.json docs/models.md
"""

import json
import re
import sys
from collections import Counter

import timm
import torch
import transformers

HEAD = """# Models that `attach` takes

Made by two commands, not by hand (transformers {transformers}, timm {timm}, torch {torch}):

    python tests/families.py --json docs/results/families.json
    python tests/models_page.py docs/results/families.json docs/models.md

The first builds every family of transformers' auto classes and every model module of timm small,
with random weights, attaches the method and compares with the plain base from outside. **exact**:
bit-identical after attach and after detach; the skip joins the residual stream as it is; all that
reads x̂ in the attention reads x̃; cached text is uncached text; no self-attention is left out but
those that pool or change the width. A family that could not be built or run small is no verdict.
Which of a model's attentions are taken, and why others are not, `mmpreproj.describe(model)` says.

"""


def reason(detail):
    """Why a family is refused, of the sentence that attach gave."""
    found = re.search(r"(?:is left out \(|^in part: )(.*?)(\)\. Its|$)", detail)
    if not found:
        return "no softmax attention over tokens was found in it"
    whys = re.findall(r": ([^;:]*?)(?:;|$)", found[1])
    return "; ".join(dict.fromkeys(why.strip() for why in whys if len(why) > 12)) or found[1]


def page(results):
    lines = [HEAD.format(**{m.__name__: m.__version__ for m in (transformers, timm, torch)})]
    lines += ["| kind | exact | of | refused | other |", "|---|---|---|---|---|"]
    uncounted = ("no self-attention", "not built")
    for kind, rows in results.items():
        counts = Counter(row[0] for row in rows.values())
        counted = sum(n for verdict, n in counts.items() if verdict not in uncounted)
        other = {v: n for v, n in counts.items() if v not in ("exact", "refused", *uncounted)}
        told = ", ".join(f"{n} {verdict}" for verdict, n in sorted(other.items())) or "none"
        lines.append(f"| {kind} | {counts['exact']} | {counted} | {counts['refused']} | {told} |")
    for kind, rows in results.items():
        lines += ["", f"## {kind}", ""]
        lines.append(", ".join(name for name, row in rows.items() if row[0] == "exact") + ".")
        for verdict, about in (
            *(("refused", reason), ("partial", str), ("scaled", str), ("inexact", str)),
            *(("not run", str), ("error", str), ("not built", lambda detail: "")),
        ):
            named = {name: row[1] for name, row in rows.items() if row[0] == verdict}
            if named:
                lines += ["", f"{verdict}:", ""]
            if verdict == "not built":
                lines += [", ".join(named) + "."] if named else []
            else:
                lines += [f"- {name}: {about(detail)[:160]}" for name, detail in named.items()]
        none = [name for name, row in rows.items() if row[0] == "no self-attention"]
        lines += ["", "without self-attention: " + ", ".join(none) + "."] if none else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as source:
        text = page(json.load(source))
    with open(sys.argv[2], "w", encoding="utf-8") as target:
        target.write(text)

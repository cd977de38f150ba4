"""English prose that is always there: the language reference that comes with CPython."""

from __future__ import annotations

import hashlib
import re

SAME_FROM = 40  # characters; shorter paragraphs ("See also:") may repeat
SHORTEST = 200  # characters; what is left of a topic that is all in another one is no document


def sample_documents() -> list[str]:
    """The topics of pydoc, about 370,000 characters of technical English and some code.

    Some topics are parts of others, word for word: paragraphs that came before are left out, so
    that no held-out text is trained on. The order is fixed and not that of the alphabet, in which
    the held-out end would be all about types. Another Python version has a slightly different text.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    documents = {}
    for name in sorted(topics):
        kept = []
        for paragraph in re.split(r"\n{2,}", topics[name].strip("\n")):
            key = " ".join(paragraph.split())
            if len(key) >= SAME_FROM and key in seen:
                continue
            seen.add(key)
            kept.append(paragraph)
        text = "\n\n".join(kept) + "\n"
        if len(text) >= SHORTEST:
            documents[name] = text
    order = sorted(documents, key=lambda name: hashlib.blake2b(name.encode()).digest())
    return [documents[name] for name in order]

"""The HTML page of `eval.explain`: one file with its own style, without scripts or links.

Everything that comes from outside is escaped here, and nowhere else.
"""

from collections.abc import Mapping
from html import escape
from typing import Any

# An allow-list that the browser enforces as well: inline style, pictures within the page
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.3rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.text { white-space: pre-wrap; background: #f4f4f4; padding: 1rem; overflow-wrap: anywhere }
.bar { background: #0072b2; height: .6rem; margin: .3rem 0 }
li { overflow-wrap: anywhere } img { image-rendering: pixelated; margin: .2rem }
figure { display: inline-block; margin: .3rem; text-align: center; font-size: .8rem }
.more { color: #666 }
"""


def page(result: Mapping[str, Any]) -> str:
    """The page that shows what `eval.explain` found; all text in it is escaped."""
    shares = [
        f"{100 * prototype['share']:.0f} % prototype {prototype['prototype']}"
        for prototype in result["levels"][0]["prototypes"]
    ]
    parts = [f"<h1>{_safe(', '.join(shares))}</h1>"]
    if "text" in result:
        parts.append(f'<p class="text">{_safe(result["text"])}</p>')
    if "picture" in result:
        parts.append(_picture(result["picture"], str(result.get("image", ""))))
    for level in result["levels"]:
        if len(result["levels"]) > 1:
            parts.append(f"<h1>{_safe(level['name'])}</h1>")
        parts += [_section(prototype) for prototype in level["prototypes"]]
    body = "\n".join(parts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>Prototypes</title>
<style>{_STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _section(prototype: Mapping[str, Any]) -> str:
    percent = 100 * prototype["share"]
    parts = [
        f"<h2>Prototype {_safe(prototype['prototype'])}: {percent:.1f} %</h2>",
        f'<div class="bar" style="width: {percent:.1f}%"></div>',
    ]
    pictures = [example for example in prototype["here"] if "picture" in example]
    parts += [
        _picture(example["picture"], f"row {example['row']}, column {example['column']}")
        for example in pictures
    ]
    for key, title in (("here", "In this document"), ("training", "Nearest in training")):
        examples = [example for example in prototype.get(key, ()) if "token" in example]
        if examples:
            items = "\n".join(f"<li>{_in_context(example)}</li>" for example in examples)
            parts.append(f"<p>{title}:</p>\n<ul>\n{items}\n</ul>")
    return "\n".join(parts)


def _in_context(example: Mapping[str, Any]) -> str:
    before, token, after = (_safe(example[key]) for key in ("before", "token", "after"))
    return f'<span class="more">{before}</span> <b>{token}</b> <span class="more">{after}</span>'


def _picture(uri: str, caption: str) -> str:
    return (
        f'<figure><img src="{_safe(uri)}" alt="{_safe(caption)}">'
        f"<figcaption>{_safe(caption)}</figcaption></figure>"
    )


def _safe(value: Any) -> str:
    return escape(str(value), quote=True)

"""The gallery: attention over passages, learning curves, gradients through time, population statistics, captions."""

from collections.abc import Callable
from html import escape

from bnrnn.config import label
from bnrnn.report.claims import entry_of
from bnrnn.report.evidence import Evidence
from bnrnn.report.site.parts import again, raw_html

CAPTIONS, ATTENTION, GRADIENTS, STATISTICS = (
    "zhang2017/fig3", "cooijmans2016/attention", "cooijmans2016/fig1a", "cooijmans2016/fig5",
)  # fmt: skip
CURVES = "cooijmans2016/table1"


def render(evidence: Evidence) -> str:
    """The gallery as MyST Markdown."""
    return "\n".join([
        "# Gallery\n",
        "Figures of what the trained models do. Each title links to the page with the numbers.\n",
        _section(evidence, ATTENTION, _attention,
                 "The darker a word, the more attention the reader gives it before it answers. Questions are from "
                 "bAbI, task 1 (Weston et al. 2015)."),
        _figure(evidence, CURVES, "fig2_pmnist",
                "Learning curves of the LSTM and the BN-LSTM that read digits pixel by pixel in a permuted order. "
                "Dotted: the paper's."),
        _section(evidence, GRADIENTS, _image,
                 "The norm of the gradient at each time step of a batch-normalized tanh RNN before training: "
                 "larger initial scales γ let it vanish."),
        _section(evidence, STATISTICS, _statistics,
                 "Population statistics are averages over the training set, with which batch normalization computes in "
                 "evaluation. Each row is a unit, each column a time step. The statistics move at first and then "
                 "settle, which is why each step has its own."),
        _section(evidence, CAPTIONS, _image,
                 "What models after a short training say about images of Flickr8k. `<unk>` stands for a word that is "
                 "too rare to be in the vocabulary."),
    ])  # fmt: skip


def _section(evidence: Evidence, key: str, show: Callable[[Evidence, str], str], about: str) -> str:
    heading = f"## [{entry_of(key).title}](results/{key}.md)\n\n"
    if not evidence.has_numbers(key):
        return f"{heading}Not measured yet. {again(entry_of(key)).replace('again ', '')}\n"
    return f"{heading}{about}\n\n{show(evidence, key)}"


def _figure(evidence: Evidence, key: str, name: str, about: str) -> str:
    """A figure of runs, if it has been drawn."""
    path, title = f"{key.split('/')[0]}/{name}.png", entry_of(key).title
    if not (evidence.folder / path).exists():
        return ""
    return f"## [{title}](results/{key}.md)\n\n{about}\n\n![{title}](results/{path})\n"


def _image(evidence: Evidence, key: str) -> str:
    for ending in ("svg", "png"):
        if (evidence.folder / f"{key}.{ending}").exists():
            return f"![{entry_of(key).title}](results/{key}.{ending})\n"
    return (evidence.folder / f"{key}.md").read_text().partition("\n")[2]  # the numbers or texts alone


def _attention(evidence: Evidence, key: str) -> str:
    """Passages whose words are shaded by attention, for each question and reader."""
    parts = []
    for question in evidence.numbers(key)["questions"]:
        right = escape(question["answer"])
        parts.append(f"<h3>{escape(' '.join(question['question']))} <small>({right})</small></h3>")
        for setting, reader in question["readers"].items():
            words = " ".join(
                f'<span class="word" style="--weight: {weight}" title="{weight:.3f}">{escape(word)}</span>'
                for word, weight in zip(question["passage"], reader["attention"], strict=True)
            )
            is_right = "right" if reader["answer"] == question["answer"] else "wrong"
            answer = f"{escape(label('setting', setting))}: <b>{escape(reader['answer'])}</b> ({is_right})"
            parts.append(f'<div class="attention"><p>{answer}</p><p class="passage">{words}</p></div>')
    return raw_html("".join(parts))


def _statistics(evidence: Evidence, key: str) -> str:
    """A heat map for each panel: units by time steps, in standard deviations over units at the last step."""
    return '<div id="statistics" class="curves-panels several"></div>\n'

"""The attention of the five readers over the passages of a few bAbI test questions.

    python experiments/cooijmans2016/attention.py [--data-dir DIR] [--out-dir DIR]

Reads the finished runs of the small version of Fig. 4a in --out-dir, with the lowest seed. Uses population statistics.
"""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

from bnrnn.config import label, sweep
from bnrnn.data.cloze import Cloze
from bnrnn.errors import report_errors
from bnrnn.report import style
from bnrnn.report.analyses import command_line, publish
from bnrnn.report.claims import analysis_of
from bnrnn.report.evidence import Evidence
from bnrnn.report.markdown import markdown
from bnrnn.report.trained import load_trained, trained_runs
from bnrnn.training.provenance import provenance

KEY = "cooijmans2016/attention"


@torch.no_grad()
def measure(data_dir: str, results_dir: Path) -> dict[str, Any]:
    analysis = analysis_of(KEY)
    runs = trained_runs(analysis.models, Evidence(results_dir), data=analysis.numbers["data"])
    seed = min(run.seed for run in runs)
    by_setting = {run.overrides["setting"]: run for run in runs if run.seed == seed}
    questions: list[dict[str, Any]] = []
    for setting in sweep(analysis.models)["setting"]:
        if setting in by_setting:
            model, data = load_trained(by_setting[setting].folder, data_dir)
            inputs, targets = chosen(data, analysis.numbers["words"], analysis.numbers["count"])
            weights, answers = model.attention(inputs), model(inputs)[0][0].argmax(-1)
            for b, (n, m) in enumerate(zip(inputs.passage_lengths, inputs.question_lengths, strict=True)):
                if len(questions) <= b:
                    passage, question = ([data.vocabulary[i] for i in ids[:size, b].tolist()] for ids, size in (
                        (inputs.passage, n), (inputs.question, m)))  # fmt: skip
                    answer = data.vocabulary[int(targets[0, b])]
                    questions.append({"passage": passage, "question": question, "answer": answer, "readers": {}})
                attention = [round(weight, 4) for weight in weights[:n, b].tolist()]
                answered = data.vocabulary[int(answers[b])]
                questions[b]["readers"][setting] = {"answer": answered, "attention": attention}
    first = by_setting[next(iter(questions[0]["readers"]))].result
    about = {"updates": first.updates, "data": first.data, "seed": seed}
    return {"name": KEY, **provenance(), **about, "questions": questions}


def chosen(data: Cloze, words: list[int], count: int) -> Any:
    """Inputs and targets of the first `count` test questions whose passages have `words[0]` to `words[1]` words."""
    lengths = torch.from_numpy(data.lengths["test"])
    places = ((lengths >= words[0]) & (lengths <= words[1])).nonzero()[:count, 0]
    batch = data.select("test", places.numpy())
    return batch.inputs, batch.targets


def render(result: dict[str, Any]) -> str:
    analysis, rows = analysis_of(KEY), []
    for question in result["questions"]:
        of_answer = [i for i, word in enumerate(question["passage"]) if word == question["answer"]]
        for setting, reader in question["readers"].items():
            share = sum(reader["attention"][i] for i in of_answer)
            top = max(range(len(reader["attention"])), key=reader["attention"].__getitem__)
            rows.append([" ".join(question["question"]), question["answer"], f"`{setting}`", reader["answer"],
                         question["passage"][top], f"{share:.2f}"])  # fmt: skip
    header = [
        "question",
        "answer",
        "reader",
        "its answer",
        "word with the highest attention",
        "attention on the correct answer",
    ]
    caption = (
        f"Population statistics, seed {result['seed']}, after up to {result['updates']:,} updates. {result['data']} "
        "(Weston et al. 2015).\n"
    )
    return f"# {analysis.title}\n\n{caption}\n{markdown(header, rows)}\n![Attention](attention.png)\n"


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel per question and one row per reader: the darker a word of the passage, the higher its attention."""
    questions = result["questions"]
    longest_passage = max(len(question["passage"]) for question in questions)
    size = (2.5 + 0.3 * longest_passage, 2.4 * len(questions))
    fig, panels = plt.subplots(len(questions), 1, figsize=size, squeeze=False)
    for ax, question in zip(panels[:, 0], questions, strict=True):
        readers = question["readers"]
        ax.imshow([reader["attention"] for reader in readers.values()], cmap="Blues", vmin=0, vmax=1, aspect="auto")
        ax.set_xticks(range(len(question["passage"])), question["passage"], rotation=90, fontsize=8)
        names = [f"{label('setting', setting)}: {reader['answer']}" for setting, reader in readers.items()]
        ax.set_yticks(range(len(readers)), names, fontsize=8)
        ax.grid(visible=False)
        ax.set_title(f"{' '.join(question['question'])}  (right: {question['answer']})", fontsize=9, loc="left")
    style.save(fig, path)


def main() -> None:
    args = command_line(__doc__).parse_args()
    torch.set_num_threads(1)
    publish(KEY, measure(args.data_dir, args.out_dir), args.out_dir, render, draw)


if __name__ == "__main__":
    report_errors(main)

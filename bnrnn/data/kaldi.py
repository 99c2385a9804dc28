"""Features and alignments in the file formats of Kaldi (Povey et al. 2011), such as those of the Wall Street Journal.

kaldi-native-io reads them. It contains Kaldi's own input code, so it knows every archive format, compressed ones too.
It can read the shape of a matrix without its content; all alignments are therefore checked before training begins.
"""

import gzip
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from bnrnn.data.frames import FrameData, Utterance
from bnrnn.errors import BnrnnError

MAX_SKIPPED = 0.05  # largest fraction of a split's utterances that may lack an alignment


class KaldiFrames(FrameData):
    """The utterances in `<data_dir>/<folder>/{train,valid,test}/`. Each of these folders has the files

    - `feats.scp`, the features, as `copy-feats` writes them; its paths are absolute or relative to the folder;
    - `ali*.gz`, `ali*.ark` or `ali*.txt`, the state of every frame, as `ali-to-pdf` writes it;
    - `cmvn.scp` of `compute-cmvn-stats`, and `utt2spk`, if features are to be normalized.

    Args:
        num_states: number of tied states of the recognizer.
        num_features: number of features of a frame.
        max_frames: longer utterances are left out.
        normalize: "speaker" uses the mean and variance of each speaker, "global" those of all training speakers, "none"
            keeps the features as they are.

    Up to 5 % of a split's utterances may lack an alignment: they are left out, and `description` names some of them.
    Raises BnrnnError if files are missing or damaged, or if features, alignments and arguments do not agree.
    """

    def __init__(
        self,
        data_dir: str,
        folder: str,
        num_states: int,
        num_features: int,
        max_frames: int = 1300,
        normalize: str = "speaker",
    ) -> None:
        if normalize not in ("speaker", "global", "none"):
            raise BnrnnError(f"data.normalize={normalize} is unknown: use speaker, global or none")
        self._whole = None
        if normalize == "global":
            of_speakers = load_statistics(Path(data_dir, folder, "train"), num_features)
            self._whole = mean_and_scale(np.sum(list(of_speakers.values()), 0))
        left_out: defaultdict[str, list[str]] = defaultdict(list)
        splits = {}
        for split in ("train", "valid", "test"):
            splits[split] = self._load(
                Path(data_dir, folder, split), num_states, num_features, max_frames, normalize, left_out
            )
        super().__init__(splits, num_states, num_features, f"Kaldi archives of {folder}", left_out)

    def _load(
        self,
        folder: Path,
        num_states: int,
        num_features: int,
        max_frames: int,
        normalize: str,
        left_out: dict[str, list[str]],
    ) -> list[Utterance]:
        scp, alignments = load_scp(folder / "feats.scp"), load_alignments(folder)
        speakers = load_table(folder / "utt2spk") if normalize == "speaker" else {}
        statistics = load_statistics(folder, num_features) if normalize == "speaker" else {}
        scales = {speaker: mean_and_scale(sums) for speaker, sums in statistics.items()}
        found, unaligned = [], []
        for name, where in tqdm(scp.items(), desc=str(folder), unit=" utterances", disable=None):
            rows, columns = shape(name, where)
            if columns != num_features:
                raise BnrnnError(f"{name} has {columns} features a frame in {where}, expected {num_features}")
            if name not in alignments:
                unaligned.append(name)
                continue
            labels = alignments[name]
            if len(labels) != rows:
                raise BnrnnError(
                    f"{folder}: the alignment of {name} has {len(labels)} frames, its features have {rows}"
                )
            if labels.min() < 0 or labels.max() >= num_states:
                raise BnrnnError(
                    f"{folder}: the alignment of {name} has states {labels.min()} to {labels.max()}, expected 0 to "
                    f"{num_states - 1}: if these are transition ids, convert them with `ali-to-pdf`"
                )
            if rows > max_frames:
                left_out[f"longer than {max_frames:,} frames"].append(name)
                continue
            scale = self._whole
            if normalize == "speaker":
                if speakers.get(name) not in scales:
                    raise BnrnnError(
                        f"{name}: expected its speaker in {folder / 'utt2spk'} and the speaker's statistics in cmvn.scp"
                    )
                scale = scales[speakers[name]]
            found.append(Utterance(name, labels, Reader(where, scale)))
        if len(unaligned) > MAX_SKIPPED * len(scp):
            raise BnrnnError(
                f"{folder}: {len(unaligned):,} of {len(scp):,} utterances have no alignment, expected at most "
                f"{MAX_SKIPPED:.0%}; the first is {unaligned[0]}"
            )
        if unaligned:
            left_out["without an alignment"] += unaligned
        return found


class Reader:
    """Reads and normalizes the features of one utterance.

    Args:
        where: `<archive>:<offset>` of the features.
        scale: the mean to subtract and the factor to multiply with, each (F,); None keeps the features as they are.
    """

    def __init__(self, where: str, scale: tuple[np.ndarray, np.ndarray] | None) -> None:
        self.where, self.scale = where, scale

    def __call__(self) -> Float[np.ndarray, "T F"]:
        try:
            features = np.array(library().FloatMatrix.read(self.where).numpy())
        except RuntimeError as error:
            raise BnrnnError(f"{self.where} is damaged: {_first_line(error)}") from error
        return features if self.scale is None else ((features - self.scale[0]) * self.scale[1]).astype(np.float32)


def library() -> ModuleType:
    try:
        import kaldi_native_io
    except ImportError as error:
        raise BnrnnError("reading Kaldi's archives needs kaldi-native-io: pip install 'bnrnn[speech]'") from error
    return kaldi_native_io


def load_table(path: Path) -> dict[str, str]:
    """Read lines of a key and a value. Raises BnrnnError for an empty file, a malformed line or a repeated key."""
    if not path.exists():
        raise BnrnnError(f"{path} is missing")
    found: dict[str, str] = {}
    for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        key, _, value = line.strip().partition(" ")
        if not key or not value.strip() or key in found:
            raise BnrnnError(f"{path}, line {n}: expected a new key and a value, found {line!r}")
        found[key] = value.strip()
    if not found:
        raise BnrnnError(f"{path} is empty")
    return found


def load_scp(path: Path) -> dict[str, str]:
    """The `<archive>:<offset>` of each key, with full paths. Raises BnrnnError for a missing archive and for a pipe."""
    found = load_table(path)
    for key, where in found.items():
        if where.endswith("|"):
            raise BnrnnError(
                f"{path}: {key} is read from a command, expected a file: write the features with copy-feats"
            )
        archive = Path(path.parent, where.rpartition(":")[0] or where)
        if not archive.exists():
            raise BnrnnError(f"{archive} is missing: {path} names it for {key}")
        found[key] = str(path.parent / where)
    return found


def load_alignments(folder: Path) -> dict[str, np.ndarray]:
    """The states of every aligned utterance, by its name. Raises BnrnnError for missing or damaged files."""
    paths = sorted(path for ending in ("gz", "ark", "txt") for path in folder.glob(f"ali*.{ending}"))
    if not paths:
        raise BnrnnError(f"{folder} has no ali*.gz, ali*.ark or ali*.txt: write alignments there with ali-to-pdf")
    found: dict[str, np.ndarray] = {}
    for path in paths:
        try:
            if path.suffix == ".gz":  # read it all: Kaldi's reader would take a damaged end for the end of the file
                with gzip.open(path) as file:
                    while file.read(2**20):
                        pass
            source = f"ark:gunzip -c '{path}'|" if path.suffix == ".gz" else f"ark:{path}"
            with library().SequentialInt32VectorReader(source) as reader:
                for key, states in reader:
                    if key in found:
                        raise BnrnnError(
                            f"{path}: {key} has a second alignment, expected one: remove the old ali* files"
                        )
                    found[key] = np.array(states, np.int32)
        except (OSError, EOFError, RuntimeError) as error:
            raise BnrnnError(f"{path} is not an archive of alignments: {_first_line(error)}") from error
    return found


def load_statistics(folder: Path, num_features: int) -> dict[str, Float[np.ndarray, "2 K"]]:
    """The statistics of each speaker (2, F + 1), as compute-cmvn-stats writes them.

    Row 0 has the sums of the features and then the number of frames; row 1 has the sums of their squares.
    """
    found = {}
    for speaker, where in load_scp(folder / "cmvn.scp").items():
        try:
            sums = np.array(library().DoubleMatrix.read(where).numpy())
        except RuntimeError as error:
            raise BnrnnError(f"{where} has no statistics of {speaker}: {_first_line(error)}") from error
        if sums.shape != (2, num_features + 1) or sums[0, -1] < 1:
            raise BnrnnError(
                f"{where}: statistics of {speaker} have shape {sums.shape}, expected (2, {num_features + 1})"
            )
        found[speaker] = sums
    return found


def mean_and_scale(sums: Float[np.ndarray, "2 K"]) -> tuple[Float[np.ndarray, " F"], Float[np.ndarray, " F"]]:
    """The mean to subtract and the factor to multiply with, so that features have mean 0 and variance 1."""
    mean = sums[0, :-1] / sums[0, -1]
    return mean, 1 / np.sqrt(np.maximum(sums[1, :-1] / sums[0, -1] - mean**2, 1e-20))


def shape(name: str, where: str) -> tuple[int, int]:
    """Number of rows and columns of a matrix in an archive. Raises BnrnnError if it cannot be read."""
    try:
        found: Any = library().MatrixShape.read(where)
    except RuntimeError as error:
        raise BnrnnError(f"{where} has no features of {name}: {_first_line(error)}") from error
    return found.num_rows, found.num_cols


def _first_line(error: Exception) -> str:
    lines = [line.removeprefix("[E] ") for line in str(error).splitlines() if line.startswith("[E]")]
    return lines[0] if lines else str(error)

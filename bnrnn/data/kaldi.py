"""Features and alignments in the file formats of Kaldi (Povey et al. 2011), such as those of the Wall Street Journal.

kaldi-native-io reads them. It contains Kaldi's own input code, so it knows every archive format, compressed ones too.
It can read the shape of a matrix without its content; all alignments are therefore checked before training begins.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from bnrnn.data.frames import FrameData, Utterance
from bnrnn.data.kaldi_files import kaldi_reason, library, load_alignments, load_scp, load_table, shape
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
                raise BnrnnError(
                    f"{where}: {name} has {columns} features a frame, expected {num_features}: write features as "
                    "docs/data.md says, or set data.num_features"
                )
            if name not in alignments:
                unaligned.append(name)
                continue
            labels = alignments[name]
            if len(labels) != rows:
                raise BnrnnError(
                    f"{folder}: the alignment of {name} has {len(labels)} frames, its features have {rows}: "
                    "write both from the same recordings"
                )
            if rows < 1 or labels.min() < 0 or labels.max() >= num_states:
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
                f"{MAX_SKIPPED:.0%}; the first is {unaligned[0]}: write the missing alignments with `ali-to-pdf`"
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
            raise BnrnnError(f"{self.where} is damaged: {kaldi_reason(error)}") from error
        return features if self.scale is None else ((features - self.scale[0]) * self.scale[1]).astype(np.float32)


def load_statistics(folder: Path, num_features: int) -> dict[str, Float[np.ndarray, "2 K"]]:
    """The statistics of each speaker (2, F + 1), as compute-cmvn-stats writes them.

    Row 0 has the sums of the features and then the number of frames; row 1 has the sums of their squares.
    """
    found = {}
    for speaker, where in load_scp(folder / "cmvn.scp").items():
        expected = (2, num_features + 1)
        if (found_shape := shape(speaker, where)) != expected:
            raise BnrnnError(f"{where}: statistics of {speaker} have shape {found_shape}, expected {expected}")
        try:
            sums = np.array(library().DoubleMatrix.read(where).numpy())
        except RuntimeError as error:
            raise BnrnnError(f"{where} has no statistics of {speaker}: {kaldi_reason(error)}") from error
        if not np.isfinite(sums).all() or sums[0, -1] < 1:
            raise BnrnnError(f"{where}: statistics of {speaker} are not finite or count no frame: write them again")
        found[speaker] = sums
    return found


def mean_and_scale(sums: Float[np.ndarray, "2 K"]) -> tuple[Float[np.ndarray, " F"], Float[np.ndarray, " F"]]:
    """The mean to subtract and the factor to multiply with, so that features have mean 0 and variance 1."""
    mean = sums[0, :-1] / sums[0, -1]
    return mean, 1 / np.sqrt(np.maximum(sums[1, :-1] / sums[0, -1] - mean**2, 1e-20))

"""Features and alignments in the file formats of Kaldi (Povey et al. 2011), such as those of the Wall Street Journal.

kaldi-native-io reads them. It contains Kaldi's own input code, so it knows every archive format, compressed ones too.
It can read the shape of a matrix without its content; all alignments are therefore checked before training begins.
"""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import Float
from tqdm import tqdm

from bnrnn.data.frames import FrameData, Utterance, check_normalize
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
        check_normalize(normalize)
        of_all = None
        if normalize == "global":
            of_speakers = load_statistics(Path(data_dir, folder, "train"), num_features)
            of_all = mean_and_scale(np.sum(list(of_speakers.values()), 0))
        left_out: defaultdict[str, list[str]] = defaultdict(list)
        splits = {}
        for split in ("train", "valid", "test"):
            path = Path(data_dir, folder, split)
            found = load_aligned(path, num_states, num_features, max_frames, left_out)
            by_speaker = normalize == "speaker"
            scales = speaker_scales(path, num_features, found) if by_speaker else dict.fromkeys(found, of_all)
            splits[split] = [Utterance(k, states, Reader(where, scales[k])) for k, (where, states) in found.items()]
        super().__init__(splits, num_states, num_features, f"Kaldi archives of {folder}", left_out)


def load_aligned(
    folder: Path, num_states: int, num_features: int, max_frames: int, left_out: dict[str, list[str]]
) -> dict[str, tuple[str, np.ndarray]]:
    """The place of the features and the states of each utterance that has both and is short enough.

    The names of the others are appended to `left_out`. Raises BnrnnError if features and states do not agree.
    """
    scp, alignments = load_scp(folder / "feats.scp"), load_alignments(folder)
    found, unaligned = {}, []
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
        states = alignments[name]
        if len(states) != rows:
            raise BnrnnError(
                f"{folder}: the alignment of {name} has {len(states)} frames, its features have {rows}: "
                "write both from the same recordings"
            )
        if states.min() < 0 or states.max() >= num_states:
            raise BnrnnError(
                f"{folder}: the alignment of {name} has states {states.min()} to {states.max()}, expected 0 to "
                f"{num_states - 1}: if these are transition ids, convert them with `ali-to-pdf`"
            )
        if rows > max_frames:
            left_out[f"longer than {max_frames:,} frames"].append(name)
        else:
            found[name] = where, states
    if len(unaligned) > MAX_SKIPPED * len(scp):
        raise BnrnnError(
            f"{folder}: {len(unaligned):,} of {len(scp):,} utterances have no alignment, expected at most "
            f"{MAX_SKIPPED:.0%}; the first is {unaligned[0]}: write the missing alignments with `ali-to-pdf`"
        )
    if unaligned:
        left_out["without an alignment"] += unaligned
    return found


def speaker_scales(
    folder: Path, num_features: int, names: Iterable[str]
) -> dict[str, tuple[Float[np.ndarray, " F"], Float[np.ndarray, " F"]]]:
    """The mean and the scale of the speaker of each utterance. Raises BnrnnError for one that has none."""
    speakers = load_table(folder / "utt2spk")
    scales = {speaker: mean_and_scale(sums) for speaker, sums in load_statistics(folder, num_features).items()}
    lacking = next((name for name in names if speakers.get(name) not in scales), None)
    if lacking is not None:
        raise BnrnnError(
            f"{lacking}: expected its speaker in {folder / 'utt2spk'} and the speaker's statistics in cmvn.scp"
        )
    return {name: scales[speakers[name]] for name in names}


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

"""A sample of TIMIT (Garofolo et al. 1993): read sentences in which people marked the phones by hand.

The features follow Laurent et al. 2015, section 4.1: the logarithms of 40 mel filters and of the energy, in windows of
25 ms every 10 ms, with their first and second differences. The classes are thirds of phones; they take the place of the
tied states of a speech recognizer.
"""

import hashlib
import io
import re
import wave
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from bnrnn.data.download import find_archive
from bnrnn.data.frames import FrameData, Utterance, check_normalize
from bnrnn.errors import BnrnnError, MissingData
from bnrnn.system.files import reading, tar_members

URL = "https://raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/corpora/timit.zip"
AGAIN = f"fetch it again from {URL}"
RATE, SHIFT, WIDTH = 16_000, 160, 400  # samples per second, samples between two frames, samples in a frame
NAMES = """aa ae ah ao aw ax ax-h axr ay b bcl ch d dcl dh dx eh el em en eng epi er ey f g gcl h# hh hv ih ix iy jh k
kcl l m n ng nx ow oy p pau pcl q r s sh t tcl th uh uw ux v w y z zh"""
PHONES: list[str] = list(NAMES.split())
NUM_PARTS = 3  # classes per phone
MOST = 1 << 26  # bytes of all files; those of the sample have 16,541,184
MOST_SECONDS = 60  # of a recording; the longest has 5.5
SHARED = ("sa1", "sa2")  # the two sentences that every speaker reads


class TimitSample(FrameData):
    """The validation and the test split have one woman and one man each; the training split has the other speakers.

    Args:
        normalize: "speaker" gives the features of each speaker mean 0 and variance 1, "global" uses the mean and
            variance of all training utterances, "none" keeps the features as they are.

    The two sentences that every speaker reads are only in the training split. Reads `<data_dir>/speech/timit*.tar.gz`,
    which has a folder with .wav and .phn files for each speaker. Raises BnrnnError if it is missing or damaged.
    """

    def __init__(self, data_dir: str, normalize: str = "speaker") -> None:
        check_normalize(normalize)
        path, files = load_archive(Path(data_dir))
        speakers = divide({name.split("/")[0] for name in files})
        found: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
        for split, members in speakers.items():
            names = [n for n in sorted(files) if n.split("/")[0] in members and n.endswith(".wav")]
            kept = [n for n in names if split == "train" or Path(n).stem not in SHARED]
            found[split] = {name.removesuffix(".wav"): load_utterance(files, name, path) for name in kept}
        groups: dict[str, list[np.ndarray]] = {}
        for split, utterances in found.items():
            for name, (features, _) in utterances.items():
                groups.setdefault(name.split("/")[0] if normalize == "speaker" else split, []).append(features)
        scales = {key: mean_and_scale(np.concatenate(values)) for key, values in groups.items()}
        splits = {}
        for split, utterances in found.items():
            splits[split] = []
            for name, (features, labels) in utterances.items():
                mean, scale = scales[name.split("/")[0] if normalize == "speaker" else "train"]
                values = features if normalize == "none" else (features - mean) * scale
                splits[split].append(Utterance(name, labels, lambda values=values: values))
        num_features = next(iter(found["train"].values()))[0].shape[1]
        super().__init__(splits, len(PHONES) * NUM_PARTS, num_features, "TIMIT sample")


def load_archive(data_dir: Path) -> tuple[Path, dict[str, bytes]]:
    """The path of the archive, and the content of its .wav and .phn files by `<speaker>/<sentence>.<ending>`."""
    path = find_archive(data_dir, ("speech/timit*.tar.gz",), URL)
    with reading(path, AGAIN):
        members = tar_members(path, partial(re.search, r"[^/]+/[^/]+\.(wav|phn)$"), MOST)
    files = {"/".join(name.split("/")[-2:]): content for name, content in members.items()}
    lacking = sorted(n for n in files if n.endswith(".wav") and n.removesuffix("wav") + "phn" not in files)
    if lacking or not files:
        what = f"{lacking[0]} has no .phn file" if lacking else "no .wav files"
        raise BnrnnError(f"{path}: {what}, expected a .wav and a .phn file for each sentence: {AGAIN}")
    return path, files


def divide(speakers: set[str]) -> dict[str, list[str]]:
    """Split the speakers, in the order of the SHA-256 of their names. The first letter after the dash is their sex.

    Raises BnrnnError for fewer than three women or men.
    """
    splits: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for sex in "fm":
        of_sex = [name for name in speakers if name.partition("-")[2][:1] == sex]
        ordered = sorted(of_sex, key=lambda name: hashlib.sha256(name.encode()).digest())
        if len(ordered) < 3:
            raise BnrnnError(
                f"TIMIT sample: {len(ordered)} speakers named <region>-{sex}..., expected at least 3: {AGAIN}"
            )
        splits["valid"].append(ordered[-2])
        splits["test"].append(ordered[-1])
        splits["train"] += ordered[:-2]
    return splits


def load_utterance(files: Mapping[str, bytes], name: str, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Features (T, F) and classes (T,) of an utterance. Raises BnrnnError if its phones end after the recording."""
    samples = read_wave(files[name], f"{path}, {name}")
    phones = name.removesuffix("wav") + "phn"
    segments = read_phones(files[phones].decode("latin-1"), f"{path}, {phones}")
    if segments[-1][1] > len(samples):
        raise BnrnnError(
            f"{path}, {phones}: the last phone ends at sample {segments[-1][1]:,}, expected at most the recording's "
            f"{len(samples):,}: {AGAIN}"
        )
    features = with_differences(log_mel(samples))
    return features, classes(segments, len(features))


def read_wave(content: bytes, source: str) -> Int[np.ndarray, " N"]:
    """The samples of a recording. Raises BnrnnError unless it has one channel of 16 bits at RATE."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            kind = file.getnchannels(), file.getsampwidth(), file.getframerate()
            claimed = file.getnframes()
            samples = np.frombuffer(file.readframes(min(claimed, len(content))), "<i2")
    except (wave.Error, EOFError, ValueError, OverflowError, MemoryError) as error:
        raise BnrnnError(f"{source} is not a .wav file ({error}): {AGAIN}") from error
    if kind != (1, 2, RATE):
        raise BnrnnError(
            f"{source} has {kind[0]} channels of {8 * kind[1]} bits at {kind[2]:,} Hz, expected 1 of 16 at {RATE:,}: "
            f"{AGAIN}"
        )
    if len(samples) != claimed:
        raise BnrnnError(f"{source} has {len(samples):,} samples, but claims {claimed:,}: {AGAIN}")
    if not WIDTH <= len(samples) <= MOST_SECONDS * RATE:
        raise BnrnnError(
            f"{source} has {len(samples):,} samples, expected at least the {WIDTH} of one frame and at most "
            f"{MOST_SECONDS * RATE:,}: {AGAIN}"
        )
    return samples


def read_phones(content: str, source: str) -> list[tuple[int, int, str]]:
    """First sample, end (exclusive) and phone of each segment. Raises BnrnnError with the number of a bad line."""
    segments: list[tuple[int, int, str]] = []
    for n, line in enumerate(content.splitlines(), 1):
        match = re.fullmatch(r"(\d{1,9}) (\d{1,9}) (\S+)", line.strip())
        begins = segments[-1][1] if segments else 0
        if match is None or int(match[1]) != begins or int(match[2]) <= begins:
            raise BnrnnError(
                f"{source}, line {n}: expected '{begins} END PHONE', END after {begins}, found {line!r}: {AGAIN}"
            )
        if match[3] not in PHONES:
            raise BnrnnError(f"{source}, line {n}: phone {match[3]!r} is unknown, expected one of TIMIT's 61: {AGAIN}")
        segments.append((begins, int(match[2]), match[3]))
    if not segments:
        raise BnrnnError(f"{source} is empty, expected lines 'BEGIN END PHONE': {AGAIN}")
    return segments


def classes(segments: list[tuple[int, int, str]], num_frames: int) -> Int[np.ndarray, " T"]:
    """The class of each frame: the phone at the middle of the frame, and which third of that phone.

    Frames whose middle lies after the last phone get the last third of the last phone.
    """
    middles = np.arange(num_frames) * SHIFT + WIDTH // 2
    ends = np.array([end for _, end, _ in segments])
    place = np.minimum(np.searchsorted(ends, middles, side="right"), len(segments) - 1)
    begins, phones = np.array([begin for begin, _, _ in segments]), np.array([PHONES.index(p) for *_, p in segments])
    third = NUM_PARTS * (middles - begins[place]) // (ends - begins)[place]
    return phones[place] * NUM_PARTS + np.clip(third, 0, NUM_PARTS - 1)


def log_mel(samples: Int[np.ndarray, " N"]) -> Float[np.ndarray, "T 41"]:
    """Logarithms of the energy and of 40 mel filters, as Kaldi's compute-fbank-feats gives them without dither."""
    try:
        import kaldi_native_fbank
    except ImportError as error:
        raise MissingData("speech features need kaldi-native-fbank: pip install 'bnrnn[speech]'") from error
    options = kaldi_native_fbank.FbankOptions()
    options.frame_opts.dither, options.mel_opts.num_bins, options.use_energy = 0.0, 40, True
    fbank = kaldi_native_fbank.OnlineFbank(options)
    fbank.accept_waveform(RATE, samples.astype(np.float32).tolist())
    fbank.input_finished()
    return np.stack([fbank.get_frame(t) for t in range(fbank.num_frames_ready)])


def with_differences(features: Float[np.ndarray, "T F"]) -> Float[np.ndarray, "T 3*F"]:
    """The features with their first and second differences, as Kaldi's add-deltas gives them."""
    first = np.arange(-2, 3) / 10
    parts = []
    for filter in ([1.0], first, np.convolve(first, first)):
        reach = len(filter) // 2
        padded = np.pad(features, ((reach, reach), (0, 0)), "edge")
        parts.append(sum(w * padded[k : k + len(features)] for k, w in enumerate(filter)))
    return np.concatenate(parts, axis=1).astype(np.float32)


def mean_and_scale(features: Float[np.ndarray, "N F"]) -> tuple[Float[np.ndarray, " F"], Float[np.ndarray, " F"]]:
    """The mean to subtract and the factor to multiply with, so that features have mean 0 and variance 1."""
    features = features.astype(np.float64)
    return features.mean(0), 1 / np.maximum(features.std(0), 1e-10)

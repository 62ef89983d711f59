#!/usr/bin/env python3
"""machine_code.py FOLDER: what ptxas made of the kernels for Hopper, in the object files under FOLDER (of scripts/build cuda).

Emulation cannot see the order of instructions. Checked for every kernel with products of warpgroups (HGMMA), softmax_cluster and attention_dq_kernel:
  nothing is kept in local memory;
  softmax_cluster: a row comes to shared memory (LDGSTS), and no vector of it (LDG of 128 bits) is read from memory once more;
  attention forward: the exponentials of a key tile stand between the wait for its scores and the wait for the products that they are
  to overlap with;
  attention: as many products as its loops are written with;
  grouped products: no fence of the whole GPU but those of the two barriers of a cluster, and multicast where b comes by TMA.
Needs cuobjdump and nvdisasm: those of the CUDA toolkit, or of $SLUICE_CUOBJDUMP. Without them nothing is checked, which is said.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# Products of the kernel at head_dim 64 and 128: of all its loops, unrolled.
PRODUCTS = {"attention_forward_kernel": (24, 32), "attention_backward_kernel": (24, 32)}
CLUSTER_BARRIERS = 2  # of grouped products: at the start and at the end
WITHOUT_PRODUCTS = ("softmax_cluster", "attention_dq_kernel")
EXPONENTIALS = 60  # of a thread's 64 scores, a few of which ptxas may move


def cuobjdump() -> str | None:
    beside = Path(os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").parent / "cuobjdump"
    for tool in (os.environ.get("SLUICE_CUOBJDUMP"), shutil.which("cuobjdump"), str(beside)):
        if tool and os.access(tool, os.X_OK):
            return tool
    return None


def kernels(tool: str, file: Path) -> list[tuple[str, list[str]]]:
    """Names and instructions."""
    text = subprocess.run([tool, "-sass", str(file)], capture_output=True, text=True, check=True).stdout
    found = []
    for part in text.split("Function : ")[1:]:
        name, *lines = part.split("\n")
        instructions = [
            re.sub(r"/\*.*?\*/", "", line).strip() for line in lines if re.search(r"/\*[0-9a-f]{4,}\*/ *\S", line)
        ]
        found.append((name.strip(), [i for i in instructions if i]))
    return found


def problems(name: str, code: list[str]) -> list[str]:
    found = []
    if any(re.search(r"\b(LDL|STL)\b", i) for i in code):
        found.append("keeps values in local memory")
    for kernel, allowed in PRODUCTS.items():
        products = sum("HGMMA" in i for i in code)
        if kernel in name and products not in allowed:
            found.append(f"{products} products, where {' or '.join(map(str, allowed))} are written")
    if "softmax_cluster" in name:
        if not any("LDGSTS" in i for i in code):
            found.append("no asynchronous copy of the row")
        if any(re.search(r"\bLDG\.\S*128\b", i) for i in code):
            found.append("reads vectors of the row a second time")
    if "grouped_linear_hopper_kernel" in name:
        fences = sum("MEMBAR" in i and ".GPU" in i for i in code)
        if fences > CLUSTER_BARRIERS:
            found.append(
                f"{fences} fences of the whole GPU, where {CLUSTER_BARRIERS} barriers of a cluster have one each"
            )
        gathers_b = "GatherE2" in name
        if any("UTMALDG" in i and "MULTICAST" in i for i in code) == gathers_b:
            found.append("multicast of a gathered b" if gathers_b else "b is not multicast")
    if "attention_forward_kernel" in name:
        waits = [(at, i) for at, i in enumerate(code) if "WARPGROUP.DEPBAR" in i]
        pairs = [(a, b) for (a, i), (b, j) in zip(waits, waits[1:]) if "gsb0, 0x1" in i and "gsb0, 0x0" in j]
        if not pairs:
            found.append("no wait for the scores before a wait for all products")
        for a, b in pairs:
            between = sum("MUFU.EX2" in i for i in code[a:b])
            if between < EXPONENTIALS:
                found.append(f"{between} exponentials overlap with products, where {EXPONENTIALS} are expected")
    return found


def main() -> int:
    tool = cuobjdump()
    if not tool:
        print("machine_code: passed over, there is no cuobjdump on this machine")
        return 0
    checked, failed = 0, 0
    for file in sorted(Path(sys.argv[1]).rglob("*hopper*.o")):
        for name, code in kernels(tool, file):
            if not any("HGMMA" in i for i in code) and not any(kernel in name for kernel in WITHOUT_PRODUCTS):
                continue
            checked += 1
            for problem in problems(name, code):
                failed += 1
                print(f"machine_code: {file.name}: {name}: {problem}", file=sys.stderr)
    if not checked:
        print(f"machine_code: no kernel with products of warpgroups under {sys.argv[1]}", file=sys.stderr)
        return 1
    print(f"machine_code: {checked} kernels, {failed} problems")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

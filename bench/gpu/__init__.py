"""``make gpu``: everything that only a machine with a GPU can show, in 25 minutes.

    make gpu                                   # all parts
    make gpu PARTS="probe correctness"         # some: python3 -m bench.gpu probe correctness
    python -m bench.gpu --tiny --device cpu    # the same code, small, where there is no GPU
    make gpu-wheels                            # what a machine without network lacks, into .whl/
    python -m bench.gpu page DIR... --keep     # docs/evidence/GPU.md from results

A bare machine needs Python with torch, a C++ compiler, cmake and ninja; the first call installs
the rest from .whl/ into an environment of its own (:mod:`.install`). A part (:mod:`.parts`) is a
list of measurements. Each runs in a process of its own with a deadline, and with a /dev/shm of its
own (:mod:`.running`); what it found is in PART.json (:mod:`.results`) as soon as it is found, in
the folder that ``OUT`` names, else in build/gpu. Several GPUs, and NCCL, are not tried.
"""

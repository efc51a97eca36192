"""optimizerd: owns the state of its node's blocks and brings them from version to version.

``machine`` decides, ``service`` feeds it from the ``inbox``, ``effects`` acts: ``kernels`` sweep
over shared memory (``emulated``: in modelled time), ``pulls`` fetch other nodes' gradients.
"""

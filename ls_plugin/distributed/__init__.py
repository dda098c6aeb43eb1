"""Several processes: how they start, what fairseq's side of them needs on CPUs, resuming with more or fewer of them."""

from ls_plugin.distributed import backends, cpu, launch, shards


def install() -> None:
    """Makes fairseq start and run several processes through this package. Calling it again changes nothing."""
    launch.install()
    cpu.install()
    backends.install()
    shards.install()

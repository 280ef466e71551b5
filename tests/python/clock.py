"""A clock for tests of what measures time: how busy the machine is changes nothing."""


class Clock:
    """Stands in for the module `time`: time passes where a call sleeps, and nowhere else."""

    def __init__(self):
        self.ns = 0

    def sleep(self, seconds):
        self.ns += round(1e9 * seconds)

    def perf_counter_ns(self):
        return self.ns

    def perf_counter(self):
        return 1e-9 * self.ns

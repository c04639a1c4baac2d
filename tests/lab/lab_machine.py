"""Start the lab's kernel as a process that cannot outlive its runner.

Two processes stand between the caller and the kernel: the runner, and a
guardian which is the kernel's parent. The guardian ends the kernel and removes
the run's directory as soon as the runner is gone, in whichever way it went
(SIGKILL included); the kernel in turn is killed with the guardian, and the kernel's
own children (one for each address space inside) are killed with the kernel.
"""

import ctypes
import fcntl
import itertools
import os
import select
import shutil
import signal
import subprocess

PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent():
    """Have the calling process killed when its parent goes."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def memory_directory(size):
    """A directory whose file system can hold SIZE bytes of guest memory."""
    for path in ("/dev/shm", os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp"):
        if path and os.path.isdir(path) and os.access(path, os.W_OK):
            stat = os.statvfs(path)
            if stat.f_bavail * stat.f_frsize > size:
                return path
    return "/tmp"


def claimed_processor(directory):
    """The processor with the fewest labs, and a descriptor that the lab's kernel is to hold.

    A lab's kernel and the programs in it take turns: on two processors, each turn wakes the other
    one, which took more than half of a lab's time.
    """
    os.makedirs(directory, exist_ok=True)
    processors = sorted(os.sched_getaffinity(0))
    places = ((number, turn) for turn in itertools.count() for number in processors)
    while True:
        number, turn = next(places)
        fd = os.open(f"{directory}/{number}.{turn}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return number, fd
        except BlockingIOError:
            os.close(fd)


def arguments(kernel, root, disks, run_dir, mem, lines, confined):
    """The kernel's command line.

    :param root: ``cow,base`` or one image
    :param mem: bytes
    :param lines: what UML calls channels, by name (``ssl0``: ``fd:4,fd:5``)
    :param confined: with AppArmor
    """
    return [
        kernel,
        f"mem={mem // 2**20}M",
        "ncpus=1",  # two make the emulator two times slower
        "seccomp=on",
        f"ubd0={root}",
        *(f"ubd{n}={path}" for n, path in enumerate(disks, 1)),
        "root=/dev/ubda",
        "rw",
        "rootflags=noinit_itable",
        "init=/sbin/lab-init",
        *(["apparmor=1", "lsm=capability,apparmor"] if confined else ["apparmor=0"]),
        "log_buf_len=16M",  # what AppArmor denied is read from there
        "con=null",
        "ssl=null",
        *(f"{name}={channel}" for name, channel in lines.items()),
        f"uml_dir={run_dir}/",
        "umid=uml",
        f"lab={run_dir}",
        "zfs.zfs_arc_max=268435456",
        "panic=-1",
        "quiet",
    ]


class Machine:
    """A started lab: a guardian with the kernel below it."""

    def __init__(self, words, run_dir, fds, log_fd, mem, processor):
        """Start the kernel with WORDS on PROCESSOR, keeping FDS open for it.

        Closes FDS in the calling process: they are the kernel's now. Its
        memory is a file of up to MEM bytes which no other process can see.
        """
        self.run_dir = run_dir
        alive, self._alive = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(self._alive)
                os.sched_setaffinity(0, {processor})
                _guard(words, run_dir, fds, log_fd, mem, alive)
            finally:
                os._exit(1)
        os.close(alive)
        for fd in fds:
            os.close(fd)
        self.pid = pid

    def end(self):
        """Kill the lab and wait until nothing of it is left."""
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
            os.waitpid(self.pid, 0)


def _guard(words, run_dir, fds, log_fd, mem, alive):
    """The guardian: never returns."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    kernel = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=log_fd,
        stderr=log_fd,
        pass_fds=fds,
        preexec_fn=die_with_parent,
        env={"TMPDIR": memory_directory(mem), "PATH": os.environ["PATH"]},
    )
    # Nothing of the caller's may be kept open by the guardian.
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, alive)
    os.closerange(alive + 1, os.sysconf("SC_OPEN_MAX"))
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    poll.register(os.pidfd_open(kernel.pid), select.POLLIN)
    poll.poll()
    kernel.kill()
    kernel.wait()
    # The kernel may have ended by itself: its log stays as long as the runner.
    os.read(alive, 1)
    shutil.rmtree(run_dir, ignore_errors=True)
    os._exit(0)

"""What a decoder process gives up once its imports are done.

Limits bound memory and keep it from opening anything; a system-call filter
(seccomp, where the kernel has it) takes away running programs, forking,
sockets, files, limits, and reaching into other processes. The filter is a list of what
is refused, not of what is allowed: decoders of many libraries run here, on
whatever libc, and a list of all that they need would break with any of them.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import resource
import signal
import struct

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

_ALLOW = 0x7FFF_0000
_ERRNO = 0x0005_0000
_CLONE_THREAD = 0x0001_0000

# BPF: load a word of the call's data, jump if equal, if greater or equal, if any
# bit is set, return.
_LOAD, _IF_EQUAL, _IF_FROM, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
# A pointer, whose halves are looked at one after the other.
_THIRD_ARGUMENT = 32

_X86_64 = {
    "open": 2, "creat": 85, "openat": 257, "openat2": 437, "unlink": 87, "unlinkat": 263,
    "rename": 82, "renameat": 264, "renameat2": 316, "truncate": 76, "mkdir": 83, "mkdirat": 258,
    "rmdir": 84, "link": 86, "linkat": 265, "symlink": 88, "symlinkat": 266, "mknod": 133,
    "mknodat": 259, "chmod": 90, "fchmodat": 268, "fchmodat2": 452, "chown": 92, "lchown": 94,
    "fchownat": 260, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280,
    "setxattr": 188, "lsetxattr": 189, "removexattr": 197, "lremovexattr": 198,
    "socket": 41, "connect": 42, "bind": 49, "listen": 50,
    "fork": 57, "vfork": 58, "execve": 59, "execveat": 322,
    "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
    "setrlimit": 160, "setpriority": 141, "sched_setaffinity": 203, "sched_setscheduler": 144,
    "sched_setparam": 142, "sched_setattr": 314, "ioprio_set": 251,
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
    "pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd": 438,
    "io_uring_setup": 425, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
    "unshare": 272, "setns": 308, "mount": 165, "keyctl": 250, "add_key": 248, "request_key": 249,
}  # fmt: skip
_AARCH64 = {
    "openat": 56, "openat2": 437, "unlinkat": 35, "renameat": 38, "renameat2": 276,
    "truncate": 45, "mkdirat": 34, "linkat": 37, "symlinkat": 36, "mknodat": 33, "fchmodat": 53,
    "fchmodat2": 452, "fchownat": 54, "utimensat": 88,
    "setxattr": 5, "lsetxattr": 6, "removexattr": 14, "lremovexattr": 15,
    "socket": 198, "connect": 203, "bind": 200, "listen": 201,
    "execve": 221, "execveat": 281,
    "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
    "setrlimit": 164, "setpriority": 140, "sched_setaffinity": 122, "sched_setscheduler": 119,
    "sched_setparam": 118, "sched_setattr": 274, "ioprio_set": 30,
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
    "pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd": 438,
    "io_uring_setup": 425, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
    "unshare": 97, "setns": 268, "mount": 40, "keyctl": 219, "add_key": 217, "request_key": 218,
}  # fmt: skip
_CLONE3 = 435
# machine: (AUDIT_ARCH_*, clone, prlimit64, refused calls)
_MACHINES = {
    "x86_64": (0xC000_003E, 56, 302, _X86_64),
    "aarch64": (0xC000_00B7, 220, 261, _AARCH64),
}
# x86-64 knows every call a second time above this (the x32 ABI).
_X32 = 0x4000_0000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def confine(memory: int) -> bool:
    """Confines the calling process for good. Returns whether the filter is in force.

    `memory` bounds its address space, in bytes.
    """
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    # No file can grow, no core dump can carry a picture to disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Descriptors that exist stay open; new ones are refused.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    instructions = _filter(platform.machine())
    if not instructions:
        return False
    program = _Program(len(instructions) // 8, instructions)
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0)


def _filter(machine: str) -> bytes:
    """The filter program; empty for a machine whose call numbers are not known here."""
    if machine not in _MACHINES:
        return b""
    architecture, clone, prlimit, refused = _MACHINES[machine]
    refuse, no_such_call = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    code = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_IF_EQUAL, architecture, 1, 0),
        _step(_RETURN, refuse),
        _step(_LOAD, _NUMBER),
        _step(_IF_FROM, _X32, 0, 1),
        _step(_RETURN, refuse),
        # libc falls back to clone, whose flags can be looked at.
        _step(_IF_EQUAL, _CLONE3, 0, 1),
        _step(_RETURN, no_such_call),
    ]
    for number in refused.values():
        code += [_step(_IF_EQUAL, number, 0, 1), _step(_RETURN, refuse)]
    code += [
        # Its own limits may be read; no limits may be set, nor those of others touched.
        _step(_IF_EQUAL, prlimit, 0, 8),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_IF_EQUAL, 0, 0, 5),
        _step(_LOAD, _THIRD_ARGUMENT),
        _step(_IF_EQUAL, 0, 0, 3),
        _step(_LOAD, _THIRD_ARGUMENT + 4),
        _step(_IF_EQUAL, 0, 0, 1),
        _step(_RETURN, _ALLOW),
        _step(_RETURN, refuse),
    ]
    code += [
        _step(_IF_EQUAL, clone, 0, 3),
        _step(_LOAD, _FIRST_ARGUMENT),
        # Threads yes, processes no.
        _step(_IF_BITS, _CLONE_THREAD, 1, 0),
        _step(_RETURN, refuse),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _step(operation: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, operand)

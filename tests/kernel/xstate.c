/* Lets user-mode Linux run on processors with AMX.

   It restores the extended registers of its processes from a buffer of 2,696 bytes, all that there was before AMX. Where the processor has
   more, ptrace(2) refuses to write less than all. So what is missing is taken from the process itself. Loaded by LD_PRELOAD. */

#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

long ptrace(enum __ptrace_request request, ...) {
  static char registers[1 << 16];
  va_list rest;
  va_start(rest, request);
  long pid = va_arg(rest, int);
  void *address = va_arg(rest, void *), *data = va_arg(rest, void *);
  va_end(rest);

  if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
    long word = -1; /* the system call writes it, and the function of the C library returns it */
    if (syscall(SYS_ptrace, request, pid, address, &word) < 0) return -1;
    errno = 0;
    return word;
  }
  if (request == PTRACE_SETREGSET && (long)address == NT_X86_XSTATE) {
    struct iovec all = {registers, sizeof registers}, *given = data;
    if (syscall(SYS_ptrace, PTRACE_GETREGSET, pid, address, &all) < 0) return -1;
    memcpy(registers, given->iov_base, given->iov_len < all.iov_len ? given->iov_len : all.iov_len);
    data = &all;
    return syscall(SYS_ptrace, request, pid, address, data);
  }
  return syscall(SYS_ptrace, request, pid, address, data);
}

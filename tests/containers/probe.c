/* Makes one system call that a contained program must not be allowed, and says what came of it: `ok`, or the error's number. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static long setns_of_1(const char *path) {
    int fd = open(path, O_RDONLY);
    return fd < 0 ? -1 : syscall(SYS_setns, fd, 0);
}

static long abstract(const char *name) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    strncpy(address.sun_path + 1, name, sizeof address.sun_path - 2);
    return connect(fd, (struct sockaddr *)&address, sizeof(sa_family_t) + 1 + strlen(name));
}

static long clone_user(void) {
    long pid = syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
    if (pid == 0) _exit(0);
    return pid;
}

static long trace_1(void) {
    long result = ptrace(PTRACE_ATTACH, 1, 0, 0);
    if (result == 0) {
        waitpid(1, 0, __WALL);
        ptrace(PTRACE_KILL, 1, 0, 0);
    }
    return result;
}

static long call(const char *what, const char *with) {
    struct timespec now;
    struct sched_param first = {.sched_priority = 1};
    char buffer[256] = {0};
    clock_gettime(CLOCK_REALTIME, &now);
#define IS(name) (strcmp(what, name) == 0)
    if (IS("add_key")) return syscall(SYS_add_key, "user", "tangram", "x", 1, -3);
    if (IS("keyctl")) return syscall(SYS_keyctl, 0, -3, 1);
    if (IS("bpf")) return syscall(SYS_bpf, 0, buffer, sizeof buffer);
    if (IS("unshare-user")) return unshare(CLONE_NEWUSER);
    if (IS("unshare-mount")) return unshare(CLONE_NEWNS);
    if (IS("unshare-net")) return unshare(CLONE_NEWNET);
    if (IS("clone-user")) return clone_user();
    if (IS("setns-mount")) return setns_of_1("/proc/1/ns/mnt");
    if (IS("setns-net")) return setns_of_1("/proc/1/ns/net");
    if (IS("mount")) return syscall(SYS_mount, "none", "/tmp", "tmpfs", 0, 0);
    if (IS("umount")) return syscall(SYS_umount2, "/proc/kcore", 2);
    if (IS("fsopen")) return syscall(430, "tmpfs", 0);
    if (IS("move_mount")) return syscall(429, -1, "/", -1, "/tmp", 0);
    if (IS("pivot_root")) return syscall(SYS_pivot_root, "/tmp", "/tmp");
    if (IS("chroot")) return chroot("/tmp");
    if (IS("reboot")) return syscall(SYS_reboot, 0xfee1dead, 672274793, 0, 0);
    if (IS("swapon")) return syscall(SYS_swapon, "/tmp/none", 0);
    if (IS("init_module")) return syscall(SYS_init_module, buffer, sizeof buffer, "");
    if (IS("finit_module")) return syscall(SYS_finit_module, 0, "", 0);
    if (IS("delete_module")) return syscall(SYS_delete_module, "none", 0);
    if (IS("kexec_load")) return syscall(SYS_kexec_load, 0, 0, 0, 0);
    if (IS("clock_settime")) return syscall(SYS_clock_settime, CLOCK_REALTIME, &now);
    if (IS("acct")) return syscall(SYS_acct, "/tmp/acct");
    if (IS("sethostname")) return sethostname("x", 1);
    if (IS("iopl")) return syscall(SYS_iopl, 3);
    if (IS("ioperm")) return syscall(SYS_ioperm, 0x80, 1, 1);
    if (IS("syslog")) return syscall(SYS_syslog, 3, buffer, sizeof buffer);
    if (IS("perf_event_open")) return syscall(SYS_perf_event_open, buffer, 0, -1, -1, 0);
    if (IS("userfaultfd")) return syscall(SYS_userfaultfd, 0);
    if (IS("open_by_handle_at")) return syscall(SYS_open_by_handle_at, AT_FDCWD, buffer, 0);
    if (IS("fanotify_init")) return syscall(SYS_fanotify_init, 0, 0);
    if (IS("quotactl")) return syscall(SYS_quotactl, 0x800001 << 8, "/dev/none", 0, buffer);
    if (IS("mknod")) return mknod("/tmp/mem", S_IFCHR | 0666, makedev(1, 1));
    if (IS("setuid")) return setuid(0);
    if (IS("setgid")) return setgid(0);
    if (IS("setgroups")) return syscall(SYS_setgroups, 0, 0);
    if (IS("nice")) return setpriority(PRIO_PROCESS, 0, -5);
    if (IS("realtime")) return sched_setscheduler(0, SCHED_FIFO, &first);
    if (IS("socket-raw")) return socket(AF_INET, SOCK_RAW, 1);
    if (IS("socket-packet")) return socket(AF_PACKET, SOCK_RAW, 0x300);
    if (IS("socket-vsock")) return socket(AF_VSOCK, SOCK_STREAM, 0);
    if (IS("io_uring")) return syscall(425, 1, buffer);
    if (IS("trace-1")) return trace_1();
    if (IS("abstract")) return abstract(with);
    if (IS("euid")) return geteuid() == 0 ? 0 : (errno = EPERM, -1);
    errno = 0;
    return -2;
}

int main(int count, char **values) {
    long result = call(count > 1 ? values[1] : "", count > 2 ? values[2] : "");
    if (result >= 0) puts("ok");
    else printf("%d\n", errno);
    return 0;
}

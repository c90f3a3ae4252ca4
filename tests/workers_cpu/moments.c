/* Preloaded into bash by test_interrupt.py: holds it at a moment at which an interrupt is lost on it. The file "armed" in the folder MOMENTS
 * asks for the next such moment. In its place comes one with the name of the moment, "forked" or "waiting", and the process id in it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int comes(const char *moment) {
    const char *folder = getenv("MOMENTS"), *wanted = getenv("MOMENT");
    char armed[4096], come[4096];
    if (!folder || !wanted || strcmp(wanted, moment)) return 0;
    snprintf(armed, sizeof armed, "%s/armed", folder);
    snprintf(come, sizeof come, "%s/%s", folder, moment);
    int file = open(armed, O_WRONLY | O_CLOEXEC);
    if (file < 0) return 0;
    dprintf(file, "%d", getpid());
    close(file);
    return rename(armed, come) == 0;
}

/* A child that was just forked stops once an interrupt waits for it. */
pid_t fork(void) {
    pid_t pid = ((pid_t(*)(void))dlsym(RTLD_NEXT, "fork"))();
    if (pid == 0 && comes("forked")) {
        sigset_t pending;
        do {
            nanosleep(&(struct timespec){0, 1000000}, NULL);
            sigpending(&pending);
        } while (!sigismember(&pending, SIGINT));
        raise(SIGSTOP);
    }
    return pid;
}

/* A shell that begins to wait for a child has its handler, and does not know the one before it yet. */
int sigaction(int number, const struct sigaction *handler, struct sigaction *before) {
    int result = ((int (*)(int, const struct sigaction *, struct sigaction *))dlsym(RTLD_NEXT, "sigaction"))(number, handler, before);
    int handles = number == SIGINT && handler && handler->sa_handler != SIG_DFL && handler->sa_handler != SIG_IGN;
    if (handles && comes("waiting")) pause();
    return result;
}

/*
 * Preloaded into the engines of a pair, so that both fit on two cores. Left
 * alone, they keep every core busy with waiting, and a hand-off of a few
 * milliseconds takes seconds because whoever has work to do gets no turn.
 *
 * NIXL's UCX plug-in has a progress thread that polls with a timeout of zero,
 * without end. Its zero timeouts, and nobody else's, become one millisecond.
 *
 * vLLM's processes wait for each other by yielding in a loop for a second before
 * they sleep. Each yield becomes a short sleep.
 *
 * On a CPU, vLLM's NIXL connector binds the worker to one core of each NUMA node,
 * and every thread that starts afterwards inherits that: the workers of all engines
 * share one core while the other one idles. Nobody is bound here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#define YIELD_NS 50000

typedef int (*poll_fn)(struct pollfd *, nfds_t, int);

static int patient(void *caller, int timeout_ms)
{
    Dl_info info;

    if (timeout_ms != 0 || !dladdr(caller, &info) || !info.dli_fname)
        return timeout_ms;
    return strstr(info.dli_fname, "libplugin_UCX") ? 1 : timeout_ms;
}

static int forward(struct pollfd *fds, nfds_t count, int timeout_ms)
{
    static poll_fn libc_poll;

    if (!libc_poll)
        libc_poll = (poll_fn)dlsym(RTLD_NEXT, "poll");
    return libc_poll(fds, count, timeout_ms);
}

int poll(struct pollfd *fds, nfds_t count, int timeout_ms)
{
    return forward(fds, count, patient(__builtin_return_address(0), timeout_ms));
}

/* The checked variant that callers compiled with _FORTIFY_SOURCE use. */
int __poll_chk(struct pollfd *fds, nfds_t count, int timeout_ms, size_t fds_bytes)
{
    (void)fds_bytes;
    return forward(fds, count, patient(__builtin_return_address(0), timeout_ms));
}

int sched_yield(void)
{
    const struct timespec pause = { .tv_sec = 0, .tv_nsec = YIELD_NS };

    nanosleep(&pause, NULL);
    return 0;
}

int sched_setaffinity(pid_t pid, size_t bytes, const cpu_set_t *cores)
{
    (void)pid;
    (void)bytes;
    (void)cores;
    return 0;
}

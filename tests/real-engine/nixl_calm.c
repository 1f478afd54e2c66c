/*
 * NIXL's UCX plug-in has a progress thread that polls with a timeout of zero,
 * which keeps one core busy per worker even when nothing is transferred. On a
 * machine with two cores that starves the engines. Preloaded, this file turns
 * the plug-in's zero timeouts, and nobody else's, into a wait of one millisecond.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <string.h>

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

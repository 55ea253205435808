/* The floor below the floors of bench-router: copies bytes between a client and the decode worker
   with three system calls a chunk (epoll_wait, recv, write) and nothing else. What it costs is what
   the kernel takes for these.

   cc -O2 -o splice splice.c && ./splice PORT WORKER_PORT */

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MOST_EVENTS = 256, MOST_BYTES = 65536 };

static int *other; /* by file descriptor; 0: none */
static int events;

static struct sockaddr_in local(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static void give_up(const char *what) {
    perror(what);
    exit(1);
}

static void watch(int fd) {
    struct epoll_event wanted = {.events = EPOLLIN, .data.fd = fd};
    if (epoll_ctl(events, EPOLL_CTL_ADD, fd, &wanted) < 0) give_up("epoll_ctl");
}

static void join(int client, int worker_port) {
    int one = 1, worker = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = local(worker_port);
    if (worker < 0 || connect(worker, (struct sockaddr *)&address, sizeof address) < 0)
        give_up("connect");
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(worker, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    other[client] = worker;
    other[worker] = client;
    watch(client);
    watch(worker);
}

static void part(int fd) {
    close(other[fd]);
    close(fd);
    other[other[fd]] = 0;
    other[fd] = 0;
}

static void copy(int fd) {
    static char bytes[MOST_BYTES];
    ssize_t count = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (count < 0 && errno == EAGAIN) return; /* another connection has its number now */
    if (count <= 0) {
        part(fd);
        return;
    }
    for (ssize_t done = 0; done < count;) { /* sockets block: a slow reader holds all up */
        ssize_t written = write(other[fd], bytes + done, count - done);
        if (written < 0) {
            part(fd);
            return;
        }
        done += written;
    }
}

int main(int count, char **given) {
    if (count != 3) {
        fprintf(stderr, "usage: splice PORT WORKER_PORT\n");
        return 2;
    }
    struct rlimit most;
    getrlimit(RLIMIT_NOFILE, &most);
    most.rlim_cur = most.rlim_max;
    setrlimit(RLIMIT_NOFILE, &most);
    other = calloc(most.rlim_cur, sizeof *other);
    events = epoll_create1(0);
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = local(atoi(given[1]));
    if (bind(listener, (struct sockaddr *)&address, sizeof address) < 0) give_up("bind");
    if (listen(listener, 8192) < 0) give_up("listen");
    watch(listener);
    for (;;) {
        struct epoll_event came[MOST_EVENTS];
        int ready = epoll_wait(events, came, MOST_EVENTS, -1);
        if (ready < 0 && errno != EINTR) give_up("epoll_wait");
        for (int i = 0; i < ready; i++) {
            int fd = came[i].data.fd;
            if (fd == listener) {
                int client = accept(listener, NULL, NULL);
                if (client >= 0) join(client, atoi(given[2]));
            } else if (other[fd]) { /* not parted from meanwhile */
                copy(fd);
            }
        }
    }
}

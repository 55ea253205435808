/* ``splice.c`` with io_uring (liburing, Linux 6.0): a chunk takes no system call of its own, one
   call submits and collects whatever there is. A floor, no proxy: a client that does not read may
   get chunks out of order.

   cc -O2 -o splice_uring splice_uring.c -luring && ./splice_uring PORT WORKER_PORT */

#include <arpa/inet.h>
#include <errno.h>
#include <liburing.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { ENTRIES = 4096, BUFFERS = 16384, BYTES = 4096, GROUP = 0, GONE = -1 };
enum { ACCEPTED, RECEIVED, SENT }; /* what an event is about */

static struct io_uring ring;
static struct io_uring_buf_ring *spare;
static char *bytes;
static int *other; /* by file descriptor; 0: none */

static struct sockaddr_in local(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static void give_up(const char *what, int error) {
    fprintf(stderr, "%s: %d\n", what, error);
    exit(1);
}

static struct io_uring_sqe *next(void) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&ring);
    while (!sqe) {
        io_uring_submit(&ring);
        sqe = io_uring_get_sqe(&ring);
    }
    return sqe;
}

/* After the call is prepared, which clears it. */
static void about(struct io_uring_sqe *sqe, int what, int number) {
    io_uring_sqe_set_data64(sqe, ((__u64)what << 32) | number);
}

static void listen_to(int fd) {
    struct io_uring_sqe *sqe = next();
    io_uring_prep_recv_multishot(sqe, fd, NULL, 0, 0);
    sqe->flags |= IOSQE_BUFFER_SELECT;
    sqe->buf_group = GROUP;
    about(sqe, RECEIVED, fd);
}

static void give_back(int buffer) {
    io_uring_buf_ring_add(spare, bytes + (size_t)buffer * BYTES, BYTES, buffer,
                          io_uring_buf_ring_mask(BUFFERS), 0);
    io_uring_buf_ring_advance(spare, 1);
}

static void join(int client, int worker_port) {
    int one = 1, worker = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = local(worker_port);
    if (worker < 0 || connect(worker, (struct sockaddr *)&address, sizeof address) < 0)
        give_up("connect", worker);
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(worker, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    other[client] = worker;
    other[worker] = client;
    listen_to(client);
    listen_to(worker);
}

static void part(int fd) {
    io_uring_submit(&ring); /* what is to be sent there, before another has its number */
    if (other[fd] != GONE) {
        shutdown(other[fd], SHUT_RDWR); /* its own last event closes it */
        other[other[fd]] = GONE;
    }
    other[fd] = 0;
    close(fd);
}

static void received(int fd, struct io_uring_cqe *cqe) {
    int more = cqe->flags & IORING_CQE_F_MORE;
    if (cqe->flags & IORING_CQE_F_BUFFER) {
        int buffer = cqe->flags >> IORING_CQE_BUFFER_SHIFT;
        if (cqe->res > 0 && other[fd] > 0) {
            struct io_uring_sqe *sqe = next();
            char *from = bytes + (size_t)buffer * BYTES;
            io_uring_prep_send(sqe, other[fd], from, cqe->res, MSG_WAITALL | MSG_NOSIGNAL);
            about(sqe, SENT, buffer);
        } else {
            give_back(buffer);
        }
    }
    if (cqe->res <= 0 && cqe->res != -ENOBUFS)
        part(fd);
    else if (!more)
        listen_to(fd);
}

int main(int count, char **given) {
    if (count != 3) {
        fprintf(stderr, "usage: splice_uring PORT WORKER_PORT\n");
        return 2;
    }
    struct rlimit most;
    getrlimit(RLIMIT_NOFILE, &most);
    most.rlim_cur = most.rlim_max;
    setrlimit(RLIMIT_NOFILE, &most);
    other = calloc(most.rlim_cur, sizeof *other);
    struct io_uring_params how = {.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN |
                                           IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_CQSIZE,
                                  .cq_entries = 8 * ENTRIES};
    int wrong = io_uring_queue_init_params(ENTRIES, &ring, &how);
    if (wrong) give_up("io_uring", wrong);
    bytes = malloc((size_t)BUFFERS * BYTES);
    void *place;
    if (!bytes || posix_memalign(&place, 4096, BUFFERS * sizeof(struct io_uring_buf)))
        give_up("memory", 0);
    spare = place;
    struct io_uring_buf_reg pool = {
        .ring_addr = (__u64)(size_t)spare, .ring_entries = BUFFERS, .bgid = GROUP};
    wrong = io_uring_register_buf_ring(&ring, &pool, 0);
    if (wrong) give_up("buffers", wrong);
    io_uring_buf_ring_init(spare);
    for (int i = 0; i < BUFFERS; i++) give_back(i);
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = local(atoi(given[1]));
    if (bind(listener, (struct sockaddr *)&address, sizeof address) < 0) give_up("bind", 0);
    if (listen(listener, 8192) < 0) give_up("listen", 0);
    struct io_uring_sqe *sqe = next();
    io_uring_prep_multishot_accept(sqe, listener, NULL, NULL, 0);
    about(sqe, ACCEPTED, 0);
    for (;;) {
        wrong = io_uring_submit_and_wait(&ring, 1);
        if (wrong < 0 && wrong != -EINTR) give_up("wait", wrong);
        struct io_uring_cqe *came[256];
        unsigned ready = io_uring_peek_batch_cqe(&ring, came, 256);
        for (unsigned i = 0; i < ready; i++) {
            int number = (int)came[i]->user_data;
            switch (came[i]->user_data >> 32) {
            case ACCEPTED:
                if (came[i]->res >= 0) join(came[i]->res, atoi(given[2]));
                break;
            case RECEIVED:
                received(number, came[i]);
                break;
            case SENT:
                give_back(number);
            }
        }
        io_uring_cq_advance(&ring, ready);
    }
}

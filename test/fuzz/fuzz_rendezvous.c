/*
What comes in through the connections of the ranks: hellos of visitors to rank 0, its replies, messages of the watch and
of data. Input: who listens (lowest two bits) and how many ranks there are, then the bytes, in pieces: a byte with the
piece's length, the piece.
*/
#include "fuzz.h"

#include "../../llmc/ranks/rendezvous.c"

enum { HELLO, REPLY, WATCH, DATA };

// In the place of waiting, which rendezvous does before it gives up.
int nanosleep(const struct timespec* wanted, struct timespec* left) {
    (void)wanted, (void)left;
    return 0;
}

// The watch speaks without the locks of stderr.
int dprintf(int fd, const char* format, ...) {
    char line[2048];
    (void)fd;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (n < 1 || line[n - 1] != '\n') { abort(); }
    line[n - 1] = '\0';
    fuzz_report(line);
    return n;
}

static void set_up(uint8_t choice) {
    memset(&self, 0, sizeof self);
    self.size = 2 + (choice >> 2 & 3), self.rank = (choice & 3) == HELLO || (choice & 3) == WATCH ? 0 : 1;
    self.timeout = 1;
    self.where = xstrdup("fuzz:1"), self.address = xstrdup("fuzz");
    self.job = 1, self.process = 2;
    self.peers = (Peer*)xcalloc(self.size, sizeof(Peer));
    for (size_t r = 0; r < self.size; r++) { self.peers[r].data = self.peers[r].watch = -1; }
    self.is_open = true;
}

static void tear_down(void) {
    for (size_t r = 0; r < self.size; r++) {
        close_socket(&self.peers[r].data);
        close_socket(&self.peers[r].watch);
    }
    free(self.peers);
    free(self.where);
    free(self.address);
}

// The next piece into the socket; false when there is none.
static bool send_piece(int to, const uint8_t** data, size_t* size) {
    if (*size == 0) { return false; }
    size_t piece = fuzz_take(data, size);
    piece = piece < *size ? piece : *size;
    if (piece && send(to, *data, piece, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno != EPIPE) { abort(); }
    *data += piece, *size -= piece;
    return true;
}

static void hear_visitors(const uint8_t* data, size_t size) {
    int left = 3;
    while (size > 0 && left-- > 0) {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) != 0) { abort(); }
        Visitor v = {.fd = ends[0]};
        bool dealt_with = false;
        while (!dealt_with && send_piece(ends[1], &data, &size)) { dealt_with = hear(&v); }
        if (!dealt_with) {
            shutdown(ends[1], SHUT_WR);
            if (!hear(&v)) { abort(); }  // its connection is closed, so its place must become free
        }
        close(ends[1]);
        char missing[LIST_BYTES] = "";
        list_missing(missing);
    }
}

static void fuzz_one(const uint8_t* data, size_t size) {
    uint8_t choice = fuzz_take(&data, &size);
    set_up(choice);
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) { abort(); }
    size_t other = self.rank == 0 ? 1 : 0;
    switch (choice & 3) {
        case HELLO: hear_visitors(data, size); break;
        case REPLY: {
            Reply reply = {.answer = WELCOME};
            memcpy(&reply, data, size < sizeof reply ? size : sizeof reply);
            check_reply(&reply);
            if (memchr(reply.host, 0, HOST_BYTES) == NULL) { abort(); }
            break;
        }
        case WATCH:
            self.peers[other].watch = ends[0];
            while (!self.peers[other].left && send_piece(ends[1], &data, &size)) { watch_receive(other); }
            break;
        default: {
            char received[64];
            self.peers[other].data = ends[0];
            while (send_piece(ends[1], &data, &size)) {}
            shutdown(ends[1], SHUT_WR);
            data_receive(other, (DataKind)(1 + (choice >> 4 & 3)), received, choice >> 6 ? sizeof received : 8);
        }
    }
    tear_down();
}

static void seed_hello(uint32_t channel, uint32_t rank, uint64_t job, uint32_t version) {
    Hello hello = {.version = version, .channel = channel, .size = 2, .rank = rank, .job = job, .process = 3};
    memcpy(hello.magic, MAGIC, sizeof MAGIC);
    snprintf(hello.host, sizeof hello.host, "host");
    unsigned char input[2 * (1 + sizeof hello)];
    input[0] = sizeof hello;
    memcpy(input + 1, &hello, sizeof hello);
    input[1 + sizeof hello] = sizeof hello;
    hello.channel = CHANNEL_WATCH;
    memcpy(input + 2 + sizeof hello, &hello, sizeof hello);
    fuzz_seed(HELLO, input, sizeof input);
    unsigned char halves[2 + sizeof hello] = {20};
    memcpy(halves + 1, &hello, 20);
    halves[21] = sizeof hello - 20;
    memcpy(halves + 22, (char*)&hello + 20, sizeof hello - 20);
    fuzz_seed(HELLO, halves, sizeof halves);
}

static void fuzz_seeds(void) {
    seed_hello(CHANNEL_DATA, 1, 1, VERSION);
    seed_hello(CHANNEL_DATA, 0, 1, VERSION);
    seed_hello(CHANNEL_DATA, 1, 9, VERSION);
    seed_hello(CHANNEL_DATA, 1, 1, 99);
    for (uint32_t answer = WELCOME; answer <= REFUSED_TWICE + 1; answer++) {
        Reply reply = {.version = VERSION, .answer = answer, .size = 2};
        memcpy(reply.magic, MAGIC, sizeof MAGIC);
        snprintf(reply.host, sizeof reply.host, "host");
        fuzz_seed(REPLY, &reply, sizeof reply);
    }
    for (uint32_t kind = 0; kind < 4; kind++) {
        WatchMessage message = {kind, "rank 1 of 2 (host host): out of memory"};
        unsigned char input[4096];
        size_t used = 0;
        for (size_t at = 0; at < sizeof message; at += 255) {
            size_t piece = sizeof message - at < 255 ? sizeof message - at : 255;
            input[used++] = (unsigned char)piece;
            memcpy(input + used, (char*)&message + at, piece);
            used += piece;
        }
        fuzz_seed(WATCH, input, used);
        DataHeader header = {kind, 8};
        unsigned char data[1 + sizeof header + 8] = {sizeof header + 8};
        memcpy(data + 1, &header, sizeof header);
        for (uint8_t wanted = 0; wanted < 4; wanted++) { fuzz_seed((uint8_t)(DATA | wanted << 4), data, sizeof data); }
    }
}

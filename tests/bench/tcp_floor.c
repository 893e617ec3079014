/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp_floor write|read SIZE TOTAL scattered|dense|flat THREADS ROUNDS [HOW [BATCH]]:
 * what two bare processes need to move the same cold rows over loopback, with
 * nothing around it: the floor under kvd's tcp transport.
 *
 * Each process has a memfd of its own and knows all rows; a thread on each side
 * has one connection, blocking, and its share of the rows. The rows of a batch are
 * named to the kernel in one call, or, where they are short, packed into a bounce
 * buffer that stays in the cache, and spread again on the other side. Times are
 * taken by who begins: a `write` until the other side has everything and has said
 * so, a `read` from the asking byte to the last one.
 *
 * HOW (auto: by the size of the rows) tries other ways of sending: named, packed,
 * zerocopy (MSG_ZEROCOPY), sendfile (of the memfd, contiguous rows); aes128gcm
 * seal records of 16 KiB as `tcp_crypto` does, and open them into the rows. BATCH is the
 * bytes of a call. Prints {"seconds": [...], "cpu_s": [...]}, one time a round and
 * what both processes' cores worked for it, which a busy machine falsifies less;
 * the first round, which warms the connections, is not among them.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <linux/errqueue.h>
#include <netinet/tcp.h>
#include <openssl/evp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "tests/bench/rows.h"

#define THREADS_MAX 64u
#define ROUNDS_MAX 1000u
#define IOVS 1024u
#define NAMED_MIN 2048u /* shorter rows are packed */
#define AHEAD 16u	/* rows asked for before they are copied */
#define BATCH_BYTES (256u << 10)

#define RECORD 16384u
#define RECORD_HEAD 5u
#define RECORD_MORE (RECORD_HEAD + 1u + 16u) /* head, type, tag */

enum how { HOW_AUTO, HOW_NAMED, HOW_PACKED, HOW_ZEROCOPY, HOW_SENDFILE, HOW_AES128GCM };

static const char *const hows[] = {"auto",     "named",	    "packed", "zerocopy",
				   "sendfile", "aes128gcm", NULL};

struct worker {
	pthread_t thread;
	pthread_barrier_t *begin, *end;
	int fd;
	bool sends;
	uint64_t first, count; /* its rows */
	uint8_t *bounce;
	struct iovec iov[IOVS];
	/* sealed */
	EVP_CIPHER_CTX *cipher;
	uint64_t number;
	uint8_t *records;
};

static struct rows rows;
static uint8_t *memory;
static int memory_fd;
static enum how how;
static uint64_t batch_bytes = BATCH_BYTES;

static void __attribute__((noreturn)) die(const char *what)
{
	fprintf(stderr, "tcp_floor: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void all(int fd, void *buf, size_t len, bool sends)
{
	uint8_t *p = buf;

	while (len > 0) {
		ssize_t n = sends ? send(fd, p, len, MSG_NOSIGNAL) : recv(fd, p, len, 0);

		if (n <= 0)
			die(sends ? "send" : "recv");
		p += n;
		len -= (size_t)n;
	}
}

/* ---- a batch of rows ---- */

static void zerocopy_wait(int fd)
{
	struct pollfd poll_fd = {.fd = fd};
	uint8_t control[256];
	struct msghdr msg = {.msg_control = control, .msg_controllen = sizeof(control)};

	while (recvmsg(fd, &msg, MSG_ERRQUEUE) < 0) {
		if (errno != EAGAIN)
			die("error queue");
		(void)poll(&poll_fd, 1, 1);
	}
}

static void named(struct worker *w, unsigned int count)
{
	struct msghdr msg = {.msg_iov = w->iov, .msg_iovlen = count};
	unsigned int notes = 0;

	while (msg.msg_iovlen > 0) {
		int flags =
			how == HOW_ZEROCOPY ? MSG_ZEROCOPY | MSG_NOSIGNAL : MSG_NOSIGNAL;
		ssize_t n = w->sends ? sendmsg(w->fd, &msg, flags)
				     : recvmsg(w->fd, &msg, MSG_WAITALL);

		if (n <= 0)
			die(w->sends ? "sendmsg" : "recvmsg");
		notes += how == HOW_ZEROCOPY && w->sends;
		while (msg.msg_iovlen > 0 && (size_t)n >= msg.msg_iov->iov_len) {
			n -= (ssize_t)msg.msg_iov->iov_len;
			msg.msg_iov++;
			msg.msg_iovlen--;
		}
		if (msg.msg_iovlen > 0) {
			msg.msg_iov->iov_base = (uint8_t *)msg.msg_iov->iov_base + n;
			msg.msg_iov->iov_len -= (size_t)n;
		}
	}
	if (notes > 0)
		zerocopy_wait(w->fd); /* the pages may change after it */
}

static void files(const struct worker *w, const uint64_t *at, unsigned int count)
{
	for (unsigned int i = 0; i < count; i++) {
		off_t offset = (off_t)at[i];
		uint64_t left = rows.bytes;

		while (left > 0) {
			ssize_t n = sendfile(w->fd, memory_fd, &offset, left);

			if (n <= 0)
				die("sendfile");
			left -= (uint64_t)n;
		}
	}
}

static void packed(struct worker *w, const uint64_t *at, unsigned int count)
{
	if (!w->sends)
		all(w->fd, w->bounce, count * rows.bytes, false);
	for (unsigned int i = 0; i < count; i++) {
		uint8_t *row = memory + at[i], *slot = w->bounce + i * rows.bytes;

		for (uint64_t b = 0; i + AHEAD < count && b < rows.bytes; b += 64)
			__builtin_prefetch(memory + at[i + AHEAD] + b);
		/* a call of memcpy a row would cost as much as a short row */
		if (rows.bytes == 256)
			memcpy(w->sends ? slot : row, w->sends ? row : slot, 256);
		else
			memcpy(w->sends ? slot : row, w->sends ? row : slot, rows.bytes);
	}
	if (w->sends)
		all(w->fd, w->bounce, count * rows.bytes, true);
}

/* ---- sealed ---- */

static void update(const struct worker *w, uint8_t *to, const void *from, size_t len)
{
	int n;

	if (EVP_CipherUpdate(w->cipher, to, &n, from, (int)len) <= 0)
		die("EVP_CipherUpdate");
}

/* `len` bytes of the batch from `pos` on, or to there. */
static void content(const struct worker *w, uint8_t *record, const uint64_t *at,
		    uint64_t pos, size_t len)
{
	uint8_t *text = record + RECORD_HEAD;
	bool packs = rows.bytes < NAMED_MIN;

	for (size_t done = 0, n; done < len; done += n, pos += n) {
		uint64_t in = pos % rows.bytes;
		uint8_t *plain =
			packs ? w->bounce + pos : memory + at[pos / rows.bytes] + in;

		n = packs || rows.bytes - in > len - done ? len - done
							  : (size_t)(rows.bytes - in);
		update(w, w->sends ? text + done : plain, w->sends ? plain : text + done,
		       n);
	}
}

static void record(struct worker *w, uint8_t *bytes, const uint64_t *at, uint64_t pos,
		   size_t len)
{
	uint8_t *type = bytes + RECORD_HEAD + len, *tag = type + 1, nonce[12] = {0};
	int n;

	memcpy(nonce, &w->number, sizeof(w->number));
	w->number++;
	if (w->sends) {
		memcpy(bytes, (uint8_t[]){23, 3, 3, 0, 0}, RECORD_HEAD);
		*type = 23;
	}
	if (EVP_CipherInit_ex(w->cipher, NULL, NULL, NULL, nonce, w->sends) <= 0 ||
	    (!w->sends &&
	     EVP_CIPHER_CTX_ctrl(w->cipher, EVP_CTRL_AEAD_SET_TAG, 16, tag) <= 0))
		die("EVP_CipherInit_ex");
	update(w, NULL, bytes, RECORD_HEAD);
	content(w, bytes, at, pos, len);
	update(w, type, type, 1);
	if (EVP_CipherFinal_ex(w->cipher, tag, &n) <= 0)
		die("a record is wrong");
	if (w->sends &&
	    EVP_CIPHER_CTX_ctrl(w->cipher, EVP_CTRL_AEAD_GET_TAG, 16, tag) <= 0)
		die("EVP_CTRL_AEAD_GET_TAG");
}

static void copy_rows(const struct worker *w, const uint64_t *at, unsigned int count)
{
	for (unsigned int i = 0; i < count; i++) {
		uint8_t *row = memory + at[i], *slot = w->bounce + i * rows.bytes;

		for (uint64_t b = 0; i + AHEAD < count && b < rows.bytes; b += 64)
			__builtin_prefetch(memory + at[i + AHEAD] + b);
		memcpy(w->sends ? slot : row, w->sends ? row : slot, rows.bytes);
	}
}

static void sealed(struct worker *w, const uint64_t *at, unsigned int count)
{
	uint64_t total = count * rows.bytes;
	size_t bytes = (size_t)(total + (total + RECORD - 1) / RECORD * RECORD_MORE);
	uint8_t *next = w->records;

	if (w->sends && rows.bytes < NAMED_MIN)
		copy_rows(w, at, count);
	if (!w->sends)
		all(w->fd, w->records, bytes, false);
	for (uint64_t pos = 0; pos < total; pos += RECORD) {
		size_t len = total - pos < RECORD ? (size_t)(total - pos) : RECORD;

		record(w, next, at, pos, len);
		next += len + RECORD_MORE;
	}
	if (w->sends)
		all(w->fd, w->records, bytes, true);
	else if (rows.bytes < NAMED_MIN)
		copy_rows(w, at, count);
}

static void share(struct worker *w)
{
	const uint64_t *at = (w->sends ? rows.from : rows.to) + w->first;
	bool packs = how == HOW_PACKED || (how == HOW_AUTO && rows.bytes < NAMED_MIN);
	uint64_t left = w->count, most = batch_bytes / rows.bytes;

	most = most < 1 ? 1 : !packs && most > IOVS ? IOVS : most;
	while (left > 0) {
		unsigned int count = (unsigned int)(left < most ? left : most);

		if (how == HOW_AES128GCM) {
			sealed(w, at, count);
		} else if (packs) {
			packed(w, at, count);
		} else if (how == HOW_SENDFILE && w->sends) {
			files(w, at, count);
		} else {
			for (unsigned int i = 0; i < count; i++)
				w->iov[i] = (struct iovec){memory + at[i], rows.bytes};
			named(w, count);
		}
		at += count;
		left -= count;
	}
}

static void *worker_main(void *arg)
{
	struct worker *w = arg;

	for (;;) {
		pthread_barrier_wait(w->begin);
		share(w);
		pthread_barrier_wait(w->end);
	}
	return NULL;
}

/* ---- two processes ---- */

static void memory_make(void)
{
	memory_fd = memfd_create("tcp_floor", MFD_CLOEXEC);
	if (memory_fd < 0 || ftruncate(memory_fd, (off_t)ROWS_REGION_BYTES) < 0)
		die("memfd");
	memory = mmap(NULL, ROWS_REGION_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED,
		      memory_fd, 0);
	if (memory == MAP_FAILED)
		die("mmap");
	memset(memory, 0x5a, ROWS_REGION_BYTES);
	(void)madvise(memory, ROWS_REGION_BYTES, 25 /* MADV_COLLAPSE, as libkvd does */);
}

static void workers_start(struct worker *workers, unsigned int threads, const int *fds,
			  bool sends, pthread_barrier_t *begin, pthread_barrier_t *end)
{
	pthread_barrier_init(begin, NULL, threads + 1);
	pthread_barrier_init(end, NULL, threads + 1);
	for (unsigned int i = 0; i < threads; i++) {
		struct worker *w = &workers[i];

		w->begin = begin;
		w->end = end;
		w->fd = fds[i];
		w->sends = sends;
		w->first = rows.count * i / threads;
		w->count = rows.count * (i + 1) / threads - w->first;
		w->cipher = EVP_CIPHER_CTX_new();
		if (!w->cipher ||
		    EVP_CipherInit_ex(w->cipher, EVP_aes_128_gcm(), NULL,
				      (const uint8_t *)"a key of no secret", NULL,
				      sends) <= 0 ||
		    posix_memalign((void **)&w->records, 4096,
				   2 * (batch_bytes + rows.bytes)) ||
		    posix_memalign((void **)&w->bounce, 4096, batch_bytes + rows.bytes) ||
		    pthread_create(&w->thread, NULL, worker_main, w))
			die("a thread");
	}
}

/* Both sides: `asks` begins each round, the other follows. */
static void rounds(int control, const int *fds, unsigned int threads, bool sends,
		   bool asks, unsigned int count, double *seconds, double *cpu)
{
	static struct worker workers[THREADS_MAX];
	static pthread_barrier_t begin, end; /* the workers stay at them */
	uint8_t byte = 0;
	double theirs;

	memory_make();
	workers_start(workers, threads, fds, sends, &begin, &end);
	for (unsigned int i = 0; i < count; i++) {
		if (asks)
			caches_sweep();
		seconds[i] = -clock_s();
		cpu[i] = -clock_s_of(CLOCK_PROCESS_CPUTIME_ID);
		all(control, &byte, 1, asks);
		pthread_barrier_wait(&begin);
		pthread_barrier_wait(&end);
		if (sends == asks) /* a write counts when the other side has it */
			all(control, &byte, 1, !asks);
		seconds[i] += clock_s();
		cpu[i] += clock_s_of(CLOCK_PROCESS_CPUTIME_ID);
		theirs = cpu[i];
		all(control, &theirs, sizeof(theirs), !asks);
		cpu[i] += asks ? theirs : 0;
	}
}

static void tune(int fd)
{
	int one = 1;

	(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	if (how == HOW_ZEROCOPY)
		(void)setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof(one));
}

static void connections(int *here, int *there, unsigned int count)
{
	struct sockaddr_in sa = {.sin_family = AF_INET,
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof(sa);
	int door = socket(AF_INET, SOCK_STREAM, 0);

	if (door < 0 || bind(door, (struct sockaddr *)&sa, len) < 0 ||
	    listen(door, 8) < 0 || getsockname(door, (struct sockaddr *)&sa, &len) < 0)
		die("listen");
	for (unsigned int i = 0; i < count; i++) {
		here[i] = socket(AF_INET, SOCK_STREAM, 0);
		if (here[i] < 0 || connect(here[i], (struct sockaddr *)&sa, len) < 0)
			die("connect");
		there[i] = accept(door, NULL, NULL);
		if (there[i] < 0)
			die("accept");
		tune(here[i]);
		tune(there[i]);
	}
	close(door);
}

static unsigned int find(const char *word, const char *const *words)
{
	for (unsigned int i = 0; words[i]; i++)
		if (strcmp(word, words[i]) == 0)
			return i;
	fprintf(stderr, "tcp_floor: %s: not one of", word);
	for (unsigned int i = 0; words[i]; i++)
		fprintf(stderr, " %s", words[i]);
	fprintf(stderr, "\n");
	exit(2);
}

static void print_list(const double *values, unsigned int count)
{
	for (unsigned int i = 0; i < count; i++)
		printf("%s%.9f", i > 0 ? ", " : "[", values[i]);
	printf("]");
}

int main(int argc, char **argv)
{
	static const char *const ops[] = {"write", "read", NULL};
	static const char *const places[] = {"flat", "scattered", "dense", NULL};
	static double seconds[ROUNDS_MAX + 1], cpu[ROUNDS_MAX + 1];
	int here[THREADS_MAX + 1], there[THREADS_MAX + 1];
	unsigned int threads, count;
	bool writes;
	pid_t pid;

	if (argc < 7 || argc > 9) {
		fprintf(stderr,
			"usage: tcp_floor write|read SIZE TOTAL scattered|dense|flat "
			"THREADS ROUNDS [HOW [BATCH]]\n");
		return 2;
	}
	writes = find(argv[1], ops) == 0;
	rows_make(&rows, strtoull(argv[2], NULL, 0), strtoull(argv[3], NULL, 0),
		  (enum rows_places)find(argv[4], places));
	threads = (unsigned int)strtoul(argv[5], NULL, 0);
	count = (unsigned int)strtoul(argv[6], NULL, 0);
	how = argc > 7 ? (enum how)find(argv[7], hows) : HOW_AUTO;
	batch_bytes = argc > 8 ? strtoull(argv[8], NULL, 0) : BATCH_BYTES;
	if (!threads || threads > THREADS_MAX || !count || count > ROUNDS_MAX)
		return fprintf(stderr, "tcp_floor: threads, rounds\n"), 2;
	connections(here, there, threads + 1);
	pid = fork();
	if (pid < 0)
		die("fork");
	if (pid == 0) { /* the other side: it follows */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		rounds(there[threads], there, threads, !writes, false, count + 1, seconds,
		       cpu);
		_exit(0);
	}
	rounds(here[threads], here, threads, writes, true, count + 1, seconds, cpu);
	printf("{\"seconds\": ");
	print_list(seconds + 1, count);
	printf(", \"cpu_s\": ");
	print_list(cpu + 1, count);
	printf("}\n");
	fflush(stdout);
	kill(pid, SIGKILL);
	(void)waitpid(pid, NULL, 0);
	_exit(0);
}

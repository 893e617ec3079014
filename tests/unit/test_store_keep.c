/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index of chunks that outlives the process, with systemd's part played by the test:
 * what it costs to read it, and what becomes of classes' places in it.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/loop/notify.h"
#include "daemon/store/keep.h"
#include "tests/lib/files_world.h"

#define CLASSES_BYTES (UINT64_C(16) << 20)
#define PARTS 100u

enum { MEMORY, INDEX, KEPT };
static const char *const names[] = {"kvd-chunks", "kvd-chunks-index"};

struct keeper {
	struct files_world w;
	int socket, kept[KEPT];
};

/* ---- systemd ---- */

static void keeper_begin(struct keeper *k)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	char path[64];

	fw_begin(&k->w, &(struct fw_args){.seed = 1});
	k->socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	snprintf(path, sizeof(path), "@kvd-keep-%d", (int)getpid());
	memcpy(addr.sun_path + 1, path + 1, strlen(path + 1));
	assert_int_equal(
		bind(k->socket, (struct sockaddr *)&addr,
		     (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path))),
		0);
	setenv("NOTIFY_SOCKET", path, 1);
	k->kept[MEMORY] = k->kept[INDEX] = -1;
}

/* What the daemon has given away. */
static void keeper_take(struct keeper *k)
{
	char text[256], control[CMSG_SPACE(sizeof(int))];
	int fd;

	for (;;) {
		struct iovec iov = {text, sizeof(text) - 1};
		struct msghdr msg = {.msg_iov = &iov,
				     .msg_iovlen = 1,
				     .msg_control = control,
				     .msg_controllen = sizeof(control)};
		ssize_t n = recvmsg(k->socket, &msg, 0);
		const struct cmsghdr *head = n > 0 ? CMSG_FIRSTHDR(&msg) : NULL;

		if (n < 0)
			return;
		text[n] = '\0';
		if (head) { /* away from where they are given */
			memcpy(&fd, CMSG_DATA(head), sizeof(fd));
			k->kept[strstr(text, names[INDEX]) ? INDEX : MEMORY] =
				fcntl(fd, F_DUPFD_CLOEXEC, 64);
			close(fd);
		}
	}
}

static void keeper_give(struct keeper *k)
{
	char text[64];
	int fd;

	for (int i = 0; i < KEPT; i++)
		assert_int_equal(dup2(k->kept[i], 3 + i), 3 + i);
	snprintf(text, sizeof(text), "%d", (int)getpid());
	setenv("LISTEN_PID", text, 1);
	setenv("LISTEN_FDS", "2", 1);
	setenv("LISTEN_FDNAMES", "kvd-chunks:kvd-chunks-index", 1);
	assert_int_equal(notify_listen_fd(&fd), 0);
	assert_int_equal(fd, -1);
}

/* ---- a daemon ---- */

/* Without files and a session. Allocations that reading the index has taken. */
static uint64_t life_begin(struct keeper *k)
{
	struct files_world *w = &k->w;
	uint64_t before;
	int memory = -1;

	if (k->kept[INDEX] >= 0)
		keeper_give(k);
	assert_int_equal(store_make(&w->kvd, &w->store), 0);
	w->kvd.part[MODULE_STORE] = w->store;
	w->store->base = w->memory;
	w->store->region = &w->region;
	assert_int_equal(keep_new(w->store, &memory, &w->store->keep), 0);
	assert_non_null(w->store->keep);
	close(memory);
	if (k->kept[INDEX] < 0)
		keeper_take(k);
	before = mem_count();
	keep_restore(w->store->keep);
	keep_settled(w->store->keep);
	return mem_count() - before;
}

static void life_end(struct keeper *k)
{
	store_free(mem_steal(k->w.store));
	k->w.kvd.part[MODULE_STORE] = NULL;
}

static void keeper_end(struct keeper *k)
{
	if (k->w.store)
		life_end(k);
	unsetenv("NOTIFY_SOCKET");
	close(k->socket);
	for (int i = 0; i < KEPT; i++)
		close(k->kept[i]);
	fw_end(&k->w);
}

static bool is_there(struct keeper *k, enum fw_kind kind, uint32_t id)
{
	const struct store_part *part = fw_part(&k->w, kind, id);

	if (!part)
		return false;
	assert_true(part->memory == PART_READY);
	assert_true(fw_is(k->w.memory + arena_offset(&part->slot), kind, id));
	return true;
}

static void tidy(struct keeper *k)
{
	store_tidy(k->w.store);
	fw_wait(&k->w, LOOP_NS_PER_MS);
}

/* Its classes' part counts as written to its end: what is not known is no use. */
static void fill_classes(struct keeper *k)
{
	uint64_t *head =
		mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, k->kept[INDEX], 0);

	assert_true(head != MAP_FAILED && head[3] > 0 && head[3] <= CLASSES_BYTES);
	head[3] = CLASSES_BYTES;
	munmap(head, 4096);
}

/* ---- cases ---- */

/* Two ranks' parts lie in turn in one slab: each class is read once, not with each. */
static void class_is_read_once_in_any_order(void **state)
{
	struct keeper k;

	(void)state;
	keeper_begin(&k);
	life_begin(&k);
	for (uint32_t id = 0; id < PARTS; id++) {
		fw_put(&k.w, KIND_A, id);
		fw_put(&k.w, KIND_A_RANK, id);
	}
	life_end(&k);
	assert_in_range(life_begin(&k), PARTS, 5 * PARTS);
	for (uint32_t id = 0; id < PARTS; id++)
		assert_true(is_there(&k, KIND_A, id) && is_there(&k, KIND_A_RANK, id));
	keeper_end(&k);
}

static void class_refused_is_read_once(void **state)
{
	struct keeper k;

	(void)state;
	keeper_begin(&k);
	life_begin(&k);
	for (uint32_t id = 0; id < PARTS; id++)
		fw_put(&k.w, KIND_A, id);
	life_end(&k);
	k.w.kvd.accounts.limit = 1; /* no room for its class */
	assert_in_range(life_begin(&k), 0, PARTS);
	assert_int_equal(k.w.store->chunk_count, 0);
	keeper_end(&k);
}

/* There is no room but where classes stood that are gone; those that are known stay. */
static void place_of_removed_class_is_reused(void **state)
{
	struct keeper k;

	(void)state;
	keeper_begin(&k);
	life_begin(&k);
	fw_put(&k.w, KIND_A, 1);
	fw_put(&k.w, KIND_OTHER, 1);
	fw_put(&k.w, KIND_B, 1);
	assert_int_equal(fw_drop(&k.w, KIND_OTHER, 1), 1);
	tidy(&k);
	fill_classes(&k);
	fw_put(&k.w, KIND_LARGE, 1);
	life_end(&k);
	life_begin(&k);
	assert_true(is_there(&k, KIND_A, 1) && is_there(&k, KIND_B, 1));
	assert_true(is_there(&k, KIND_LARGE, 1));
	assert_false(is_there(&k, KIND_OTHER, 1));
	keeper_end(&k);
}

/* Pinned when its name is dropped, before it is full (2) or behind that (1), when the
 * process is killed. */
static void chunk_dropped_is_not_restored(void **state)
{
	struct store_chunk *chunks[2];
	struct store_part *late;
	struct keeper k;
	struct stat st;
	uint8_t *index, *then;

	(void)state;
	keeper_begin(&k);
	life_begin(&k);
	fw_put(&k.w, KIND_A, 0);
	fw_put(&k.w, KIND_A, 1);
	assert_int_equal(fw_put_begin(&k.w, KIND_A, 2, &late), 0);
	chunks[0] = fw_part(&k.w, KIND_A, 1)->chunk;
	chunks[1] = late->chunk;
	for (unsigned int i = 0; i < 2; i++) {
		store_chunk_pin(chunks[i]);
		assert_int_equal(fw_drop(&k.w, KIND_A, 1 + i), 1);
	}
	fw_put_end(late);
	assert_int_equal(fstat(k.kept[INDEX], &st), 0);
	index = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED,
		     k.kept[INDEX], 0);
	then = malloc((size_t)st.st_size);
	assert_true(index != MAP_FAILED && then);
	memcpy(then, index, (size_t)st.st_size);
	for (unsigned int i = 0; i < 2; i++)
		store_chunk_unpin(chunks[i]);
	life_end(&k);
	memcpy(index, then, (size_t)st.st_size);
	munmap(index, (size_t)st.st_size);
	free(then);
	life_begin(&k);
	assert_true(is_there(&k, KIND_A, 0));
	assert_null(fw_part(&k.w, KIND_A, 1));
	assert_null(fw_part(&k.w, KIND_A, 2));
	keeper_end(&k);
}

/* Kinds come and go, daemons too, always without room: what is there is what was put. */
static void classes_change_without_space(void **state)
{
	enum { ROUNDS = 600, IDS = 3 };
	bool model[FW_KINDS][IDS] = {0};
	struct keeper k;

	(void)state;
	keeper_begin(&k);
	life_begin(&k);
	fw_put(&k.w, KIND_A, 0);
	model[KIND_A][0] = true;
	srandom(5);
	for (unsigned int i = 0; i < ROUNDS; i++) {
		enum fw_kind kind = (enum fw_kind)((unsigned int)random() % FW_KINDS);
		uint32_t id = (uint32_t)random() % IDS;

		fill_classes(&k);
		if (!model[kind][id]) {
			fw_put(&k.w, kind, id);
			model[kind][id] = true;
		} else {
			assert_int_equal(fw_drop(&k.w, kind, id), 1);
			model[kind][id] = false;
			if (kind == KIND_A || kind == KIND_A_RANK) /* one chunk */
				model[KIND_A][id] = model[KIND_A_RANK][id] = false;
			tidy(&k);
		}
		if (random() % 8 == 0) {
			life_end(&k);
			life_begin(&k);
		}
		for (unsigned int at = 0; at < FW_KINDS; at++) {
			for (uint32_t n = 0; n < IDS; n++)
				assert_int_equal(is_there(&k, (enum fw_kind)at, n),
						 model[at][n]);
		}
	}
	keeper_end(&k);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(class_is_read_once_in_any_order),
		cmocka_unit_test(class_refused_is_read_once),
		cmocka_unit_test(place_of_removed_class_is_reused),
		cmocka_unit_test(chunk_dropped_is_not_restored),
		cmocka_unit_test(classes_change_without_space),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests_name("store_keep", tests, NULL, NULL);
}

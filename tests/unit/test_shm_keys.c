/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shm: keys and mappings: who gets a file, what is refused, what a cut one costs.
 */
#include "daemon/transport/shm/shm_private.h"

#include <fcntl.h>
#include <semaphore.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/lib/file.h"
#include "tests/lib/shm_duo.h"

/* ---- keys ---- */

static void key_of_removed_registration_is_refused(void **state)
{
	struct duo *t = duo_pair();
	struct memory *m = NULL;
	struct xp_reg *reg = NULL;
	struct xp_key *key = NULL;
	uint8_t packed[XP_KEY_MAX];
	size_t len = 0;

	(void)state;
	assert_int_equal(memory_new_linear(4096, &m), 0);
	assert_int_equal(shm_transport.mem_reg(t->a.xp, m, &reg), 0);
	assert_int_equal(
		shm_transport.key_pack(reg, t->a.peer, packed, sizeof(packed), &len), 0);
	assert_int_equal(shm_transport.key_pack(reg, t->a.peer, packed, 5, &len),
			 -err_errno(ERR_TOOBIG));
	/* every byte of nonce and number matters */
	for (size_t i = 2; i < 2 + 8 + 16; i++) {
		packed[i] ^= 1;
		assert_int_equal(
			shm_transport.key_unpack(t->b.peer, packed, len, NULL, &key), 0);
		DUO_WAIT(t, t->b.keys_bad == i - 1);
		assert_int_equal(t->b.key_err.code, ERR_REVOKED);
		shm_transport.key_drop(key);
		packed[i] ^= 1;
	}
	/* a length that is not the memory's */
	packed[len - 8] ^= 1;
	assert_int_equal(shm_transport.key_unpack(t->b.peer, packed, len, NULL, &key), 0);
	DUO_WAIT(t, t->b.key_err.code == ERR_RANGE);
	shm_transport.key_drop(key);
	packed[len - 8] ^= 1;
	for (size_t i = 0; i < len; i++)
		assert_int_equal(
			shm_transport.key_unpack(t->b.peer, packed, i, NULL, &key),
			-err_errno(ERR_PROTO));
	shm_transport.mem_dereg(reg);
	assert_int_equal(shm_transport.key_unpack(t->b.peer, packed, len, NULL, &key), 0);
	unsigned int bad = t->b.keys_bad;
	DUO_WAIT(t, t->b.keys_bad > bad);
	assert_int_equal(t->b.key_err.code, ERR_REVOKED);
	shm_transport.key_drop(key);
	memory_unref(m);
	duo_end(t);
}

/* Dropped in every state of its life, also before the answer and the map. */
static void key_dropped_early_is_freed(void **state)
{
	struct duo *t = duo_pair();
	struct xp_key *keys[100];
	struct duo_shared s;
	uint8_t packed[XP_KEY_MAX];
	size_t len = 0;

	(void)state;
	duo_shared_new(&s, &t->a, &t->b, 1 * DUO_MIB, false);
	assert_int_equal(
		shm_transport.key_pack(s.reg, t->a.peer, packed, sizeof(packed), &len),
		0);
	for (unsigned int turns = 0; turns < 12; turns++) {
		unsigned int ok = t->b.keys_ok;

		for (size_t i = 0; i < ARRAY_LEN(keys); i++)
			assert_int_equal(shm_transport.key_unpack(t->b.peer, packed, len,
								  NULL, &keys[i]),
					 0);
		for (unsigned int i = 0; i < turns; i++)
			loop_turn(t->loop, 0);
		for (size_t i = 0; i < ARRAY_LEN(keys); i += 2)
			shm_transport.key_drop(keys[i]);
		DUO_WAIT(t, t->b.keys_ok >= ok + ARRAY_LEN(keys) / 2);
		for (size_t i = 1; i < ARRAY_LEN(keys); i += 2)
			shm_transport.key_drop(keys[i]);
	}
	duo_shared_free(&s);
	duo_end(t);
}

/* No file descriptor is left for a while: that costs the key, not the peer. */
static void key_without_descriptors_fails_alone(void **state)
{
	struct duo *t = duo_pair();
	struct rlimit before, none;
	struct xp_key *key = NULL;
	struct duo_shared s;
	uint8_t packed[XP_KEY_MAX];
	size_t len = 0;
	unsigned int ok;
	int next;

	(void)state;
	duo_shared_new(&s, &t->a, &t->b, 1 * DUO_MIB, false);
	assert_int_equal(
		shm_transport.key_pack(s.reg, t->a.peer, packed, sizeof(packed), &len),
		0);
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
	next = open("/dev/null", O_RDONLY | O_CLOEXEC);
	assert_true(next >= 0);
	close(next);
	none = (struct rlimit){(rlim_t)next, before.rlim_max};
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
	assert_int_equal(shm_transport.key_unpack(t->b.peer, packed, len, NULL, &key), 0);
	DUO_WAIT(t, t->b.keys_bad == 1);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
	assert_int_equal(t->b.key_err.code, ERR_LIMIT);
	shm_transport.key_drop(key);
	ok = t->b.keys_ok;
	assert_int_equal(shm_transport.key_unpack(t->b.peer, packed, len, NULL, &key), 0);
	DUO_WAIT(t, t->b.keys_ok == ok + 1);
	assert_int_equal(t->a.lost + t->b.lost, 0);
	shm_transport.key_drop(key);
	duo_shared_free(&s);
	duo_end(t);
}

static void peer_memory_is_mapped_read_only(void **state)
{
	struct duo *t = duo_pair();
	struct duo_shared s;
	const struct shm_key *key;

	(void)state;
	duo_shared_new(&s, &t->a, &t->b, 64 * DUO_KIB, false);
	key = (const struct shm_key *)(const void *)s.key;
	assert_false(key->memory->writable);
	assert_int_equal(fcntl(key->memory->fd, F_GETFL) & O_ACCMODE, O_RDONLY);
	assert_int_equal(key->memory->kind, MEMORY_SEALED);
	duo_shared_free(&s);
	duo_end(t);
}

/* Its pages would be made at the mapper's expense; the ring carries it still. */
static void peer_memory_with_holes_is_not_mapped(void **state)
{
	struct duo *t = duo_pair();
	struct duo_transfer x;

	(void)state;
	duo_transfer_init(&x, t, XP_WRITE, 4096, 256, false, false);
	for (unsigned int i = 0; t->b.keys_bad == 0 && i < 10; i++) {
		shm_transport.key_drop(x.src.key);
		/* of a folio that somebody holds the kernel clears bytes, and keeps it */
		assert_int_equal(fallocate(x.src.memory->fd,
					   FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
					   (off_t)x.bytes / 2),
				 0);
		x.src.key = duo_key_of(&t->a, x.src.reg, &t->b);
		assert_true(t->b.keys_bad == 1 ||
			    lseek(x.src.memory->fd, 0, SEEK_HOLE) >= (off_t)x.bytes / 2);
	}
	assert_int_equal(t->b.keys_bad, 1);
	assert_int_equal(t->b.key_err.code, ERR_IMPORT);
	x.remote_src.key = x.src.key;
	assert_int_equal(duo_post(&x), 0);
	DUO_WAIT(t, x.top.calls);
	duo_assert_done(&x, ERR_OK);
	duo_transfer_check(&x);
	duo_transfer_fini(&x);
	duo_end(t);
}

/* Memory whose mapping is not there yet goes through the ring at once. */
static void write_before_its_key_is_usable_is_staged(void **state)
{
	struct duo *t = duo_pair();
	struct duo_transfer x;

	(void)state;
	duo_transfer_init(&x, t, XP_WRITE, 3000, 256, false, false);
	x.remote_src.key = NULL;
	assert_int_equal(duo_post(&x), 0);
	DUO_WAIT(t, x.top.calls);
	duo_assert_done(&x, ERR_OK);
	duo_transfer_check(&x);
	duo_transfer_fini(&x);
	duo_end(t);
}

/* Of a table's buffer that no row names the key may still be with a helper, which
 * writes its memory, and takes it back where the mapping fails. */
static void key_being_mapped_is_not_read(void **state)
{
	struct duo *t = duo_pair();
	struct memory *mapped = NULL;
	struct duo_transfer x, y;
	struct xp_buffer src[2];
	struct shm_key *key;

	(void)state;
	duo_transfer_init(&y, t, XP_WRITE, 1, 4096, false, false);
	duo_transfer_init(&x, t, XP_WRITE, 3000, 256, false, false);
	assert_int_equal(memory_new_linear(4096, &mapped), 0);
	src[0] = x.remote_src;
	src[1] = (struct xp_buffer){.key = y.src.key, .length = 4096};
	key = (struct shm_key *)(void *)y.src.key;
	memory_unref(key->memory);
	sm_init(&key->sm, key->sm.table, SHM_KEY_MAPPING);
	key->memory = mapped;
	t->b.sides.src = src;
	t->b.sides.src_count = 2;
	t->b.answer = DUO_HOLD;
	assert_int_equal(duo_post(&x), 0);
	DUO_WAIT(t, t->b.requests == 1);
	shm_transport.land(t->b.seen[0].in, &t->b.sides, NULL);
	assert_int_equal(atomic_load(&mapped->refs), 1);
	DUO_WAIT(t, x.top.calls);
	duo_assert_done(&x, ERR_OK);
	duo_transfer_check(&x);
	sm_init(&key->sm, key->sm.table, SHM_KEY_READY);
	duo_transfer_fini(&x);
	duo_transfer_fini(&y);
	duo_end(t);
}

struct stop {
	struct offload_job job;
	sem_t go;
};

static void stop_work(struct offload_job *job)
{
	sem_wait(&container_of(job, struct stop, job)->go);
}

static void stop_done(struct offload_job *job)
{
	job->submitted = false;
}

/* The peer's object is freed before the helper comes to its key. */
static void key_mapped_after_peer_is_gone_is_freed(void **state)
{
	struct duo *t = duo_pair();
	struct stop stop = {.job = {.work = stop_work, .done = stop_done}};
	struct duo_shared s;
	struct xp_key *xkey = NULL;
	const struct shm_key *key;
	uint8_t packed[XP_KEY_MAX];
	size_t len = 0;

	(void)state;
	duo_shared_new(&s, &t->a, NULL, 64 * DUO_KIB, false);
	assert_int_equal(
		shm_transport.key_pack(s.reg, t->a.peer, packed, sizeof(packed), &len),
		0);
	assert_int_equal(sem_init(&stop.go, 0, 0), 0);
	offload_submit(t->offload, &stop.job); /* the one helper is busy */
	assert_int_equal(shm_transport.key_unpack(t->b.peer, packed, len, NULL, &xkey),
			 0);
	key = (const struct shm_key *)(const void *)xkey;
	DUO_WAIT(t, key->mapping);
	shm_transport.key_drop(xkey);
	shm_transport.peer_close(t->b.peer, duo_on_closed, &t->b);
	DUO_WAIT(t, t->b.closed);
	assert_null(key->peer);
	sem_post(&stop.go);
	DUO_WAIT(t, offload_pending(t->offload) == 0);
	assert_int_equal(t->b.keys_ok + t->b.keys_bad, 0);
	sem_destroy(&stop.go);
	duo_shared_free(&s);
	duo_end(t);
}

/* The source's memory is cut while the destination copies it. */
static void cut_source_fails_its_transfer_only(void **state)
{
	struct duo *t = duo_pair();
	struct duo_transfer x, y;
	int fd = memfd_create("cut", MFD_CLOEXEC);

	(void)state;
	duo_transfer_init(&x, t, XP_WRITE, 1000, 256, false, false);
	duo_shared_free(&x.src);
	assert_int_equal(file_fill(fd, x.bytes), 0);
	x.src = (struct duo_shared){0};
	assert_int_equal(memory_import_shm_fd(fd, 0, x.bytes, true, &x.src.memory), 0);
	assert_int_equal(shm_transport.mem_reg(t->a.xp, x.src.memory, &x.src.reg), 0);
	x.src.key = duo_key_of(&t->a, x.src.reg, &t->b);
	x.local.reg = x.src.reg;
	x.remote_src.key = x.src.key;
	assert_int_equal(ftruncate(fd, 8192), 0);
	assert_int_equal(duo_post(&x), 0);
	DUO_WAIT(t, x.top.calls);
	duo_assert_done(&x, ERR_FAULT);
	assert_int_equal(t->b.seen[0].err.code, ERR_FAULT);
	duo_transfer_init(&y, t, XP_WRITE, 1000, 256, false, false);
	assert_int_equal(duo_post(&y), 0);
	DUO_WAIT(t, y.top.calls);
	duo_assert_done(&y, ERR_OK);
	duo_transfer_fini(&x);
	duo_transfer_fini(&y);
	close(fd);
	duo_end(t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(key_of_removed_registration_is_refused),
		cmocka_unit_test(key_dropped_early_is_freed),
		cmocka_unit_test(key_without_descriptors_fails_alone),
		cmocka_unit_test(peer_memory_is_mapped_read_only),
		cmocka_unit_test(peer_memory_with_holes_is_not_mapped),
		cmocka_unit_test(write_before_its_key_is_usable_is_staged),
		cmocka_unit_test(key_being_mapped_is_not_read),
		cmocka_unit_test(key_mapped_after_peer_is_gone_is_freed),
		cmocka_unit_test(cut_source_fails_its_transfer_only),
	};

	return cmocka_run_group_tests_name("shm_keys", tests, NULL, NULL);
}

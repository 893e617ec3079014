/* SPDX-License-Identifier: Apache-2.0 */
/* shm: private memory of the peer's engine, read where it lies, and by whose right. */
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/memory/vm.h"
#include "tests/lib/gates.h"
#include "tests/lib/limits.h"
#include "tests/lib/shm_duo.h"

static struct shm *shm_of(struct duo_node *n)
{
	return (struct shm *)(void *)n->xp;
}

static struct duo *pair(bool a_direct, bool b_direct)
{
	struct duo *t = duo_pair();

	shm_of(&t->a)->vm_direct = a_direct;
	shm_of(&t->b)->vm_direct = b_direct;
	return t;
}

static const char *path_of(struct duo_node *n)
{
	return ((struct xp_peer_base *)(void *)n->peer)->path;
}

/* ---- bytes ---- */

static void memory_private_is_read_in_place(void **state)
{
	static const struct {
		enum xp_kind kind;
		bool dst_vm;
		uint64_t rows, len;
	} cases[] = {
		{XP_WRITE, false, 1000, 256}, {XP_READ, false, 1000, 256},
		{XP_WRITE, true, 1000, 256},  {XP_READ, true, 1000, 256},
		{XP_WRITE, true, 9, 1 << 20}, {XP_READ, true, 1, 1},
		{XP_READ, false, 9, 1 << 20}, {XP_WRITE, true, 30000, 3},
	};
	struct duo *t = pair(true, true);

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		struct duo_transfer x;
		unsigned int n = t->b.requests;

		duo_transfer_init(&x, t, cases[i].kind, cases[i].rows, cases[i].len, true,
				  cases[i].dst_vm);
		assert_int_equal(duo_post(&x), 0);
		DUO_WAIT(t, x.top.calls && t->b.inbound_dones == n + 1);
		duo_assert_done(&x, ERR_OK);
		/* who reads by himself asks afterwards whether it counts */
		assert_int_equal(t->b.seen[n].kind,
				 cases[i].kind == XP_READ ? XP_CHECK : XP_WRITE);
		duo_transfer_check(&x);
		duo_transfer_fini(&x);
	}
	assert_string_equal(path_of(&t->a), "memfd + vm"); /* it pulled */
	assert_string_equal(path_of(&t->b), "memfd + vm");
	duo_end(t);
}

static void memory_private_with_vm_off_uses_ring(void **state)
{
	(void)state;
	for (int i = 0; i < 2; i++) {
		struct duo *t = pair(i == 0, i == 1);
		struct duo_transfer x;

		duo_transfer_init(&x, t, XP_WRITE, 1000, 256, true, true);
		assert_int_equal(duo_post(&x), 0);
		DUO_WAIT(t, x.top.calls);
		duo_assert_done(&x, ERR_OK);
		duo_transfer_check(&x);
		assert_string_equal(path_of(&t->b), "memfd + bounce ring");
		duo_transfer_fini(&x);
		duo_end(t);
	}
}

/* ---- whose ---- */

/* A child with these ids; dumpable or not. */
static pid_t child_with(uid_t real, uid_t effective, uid_t saved, bool dumpable)
{
	int ready[2];
	char byte;
	pid_t pid;

	assert_int_equal(pipe(ready), 0);
	pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (setresuid(real, effective, saved) < 0 ||
		    prctl(PR_SET_DUMPABLE, dumpable) < 0 || write(ready[1], "", 1) != 1)
			_exit(1);
		for (;;)
			pause();
	}
	assert_true(pid > 0);
	close(ready[1]);
	assert_int_equal(read(ready[0], &byte, 1), 1);
	close(ready[0]);
	return pid;
}

static void judge(uid_t real, uid_t effective, uid_t saved, bool dumpable, uid_t user,
		  bool may)
{
	pid_t pid = child_with(real, effective, saved, dumpable);
	struct memory_owner owner = {.warden = test_warden(),
				     .uid = user,
				     .pid = pid,
				     .pidfd = (int)syscall(SYS_pidfd_open, pid, 0)};
	int fd = -1, r = vm_open(&owner, O_RDONLY, &fd);

	if ((r == 0) != may)
		fail_msg("ids %u %u %u, dumpable %d, for user %u: %s", real, effective,
			 saved, dumpable, user, r < 0 ? err_last()->text : "allowed");
	err_clear();
	mem_closep(&fd);
	close(owner.pidfd);
	kill(pid, SIGKILL);
	assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static void process_of_another_user_is_not_opened(void **state)
{
	uid_t me = getuid();

	(void)state;
	judge(me, me, me, true, me, true);
	if (me != 0) {
		print_message("not root: other users' processes cannot be made\n");
		return;
	}
	if (!may_become(1234)) {
		print_message("no such user here: its process cannot be made\n");
		return;
	}
	judge(1234, 1234, 1234, true, 1234, true);
	judge(1234, 1234, 1234, true, 1235, false);
	judge(1234, 1234, 1234, false, 1234, false); /* it keeps a secret */
	judge(1234, 1234, 0, true, 1234, false); /* it was mightier, and may be again */
	judge(0, 1234, 1234, true, 1234, false);
	judge(0, 0, 0, true, 1234, false);
	judge(1234, 1234, 1234, true, 0, false);
}

/* ---- what is given ---- */

/* b's key of it. */
static struct shm_key *ask_key(struct duo *t, struct duo_shared *s)
{
	struct shm_key *key;

	s->key = duo_key_of(&t->a, s->reg, &t->b);
	key = (struct shm_key *)(void *)s->key;
	assert_true(key->vm);
	DUO_WAIT(t, key->base.ready);
	return key;
}

static void memory_missing_is_staged_and_fails_there(void **state)
{
	struct duo *t = pair(true, true);
	struct duo_shared s;
	struct shm_key *key;

	(void)state;
	duo_shared_new(&s, &t->a, NULL, 65536, true);
	s.memory->address = 4096; /* nothing is mapped there */
	key = ask_key(t, &s);
	assert_null(key->memory);
	s.memory->address = (uintptr_t)s.heap;
	t->b.xp->ops->key_drop(s.key);
	s.key = NULL;
	duo_shared_free(&s);
	duo_end(t);
}

static void process_exit_ends_its_key(void **state)
{
	struct duo *t = pair(true, true);
	pid_t pid = child_with(getuid(), getuid(), getuid(), true);
	struct duo_shared s;
	struct shm_key *key;
	static uint8_t bytes[8192];
	uint8_t byte;

	(void)state;
	memset(&s, 0, sizeof(s));
	assert_int_equal(vm_import_pid(pid, (uintptr_t)bytes, sizeof(bytes), &s.memory),
			 0);
	assert_int_equal(t->a.xp->ops->mem_reg(t->a.xp, s.memory, &s.reg), 0);
	key = ask_key(t, &s);
	assert_non_null(key->memory);
	assert_false(key->memory->writable);
	assert_int_equal(vm_byte(key->memory, true, &byte, (uintptr_t)bytes), 1);
	assert_int_equal(vm_byte(key->memory, false, &byte, (uintptr_t)bytes), -1);
	kill(pid, SIGKILL);
	assert_int_equal(waitpid(pid, NULL, 0), pid);
	assert_int_equal(vm_byte(key->memory, true, &byte, (uintptr_t)bytes), -1);
	t->b.xp->ops->key_drop(s.key);
	/* and who asks now is staged: it fails at its own daemon, by name */
	s.key = duo_key_of(&t->a, s.reg, &t->b);
	key = (struct shm_key *)(void *)s.key;
	DUO_WAIT(t, key->base.ready);
	assert_null(key->memory);
	t->b.xp->ops->key_drop(s.key);
	t->a.xp->ops->mem_dereg(s.reg);
	memory_unref(s.memory);
	duo_end(t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(memory_private_is_read_in_place),
		cmocka_unit_test(memory_private_with_vm_off_uses_ring),
		cmocka_unit_test(process_of_another_user_is_not_opened),
		cmocka_unit_test(memory_missing_is_staged_and_fails_there),
		cmocka_unit_test(process_exit_ends_its_key),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}

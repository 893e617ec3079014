/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private memory of a peer's engine (vm), read where it lies.
 *
 * Such memory has no file to pass, so both daemons would have to take part: one fills
 * slots, the other empties them (shm_ring.c), and each slot crosses from one core's cache
 * to another's. Where the kernel lets the destination's daemon read the other engine
 * too, it does all of the copying, as with a file: one thread, one bounce buffer that
 * stays in its cache, or none at all where only one side is vm.
 *
 * The owner's daemon names the process by a pidfd, which cannot come to mean
 * another one, and the stretch that it has registered. The asker may have more rights
 * than the side that is asked: a root daemon can read every process, and must not do so
 * for a daemon that could not. So it reads only what the peer's own user, as the kernel
 * names it (SO_PEERCRED), may: processes all of whose user ids are that user's
 * and that may be dumped (files of /proc/PID are the user's only then).
 *
 * Whatever stands in the way (another pid namespace, Yama, a daemon that has its right by
 * a capability) is no fault: the key is usable and its bytes go through the ring, as the
 * path says. `vm_direct = no` asks for that.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/transport/shm/shm_private.h"

/* ---- the side that is asked ---- */

static int pidfd_of(struct memory *memory)
{
	int fd = (int)syscall(SYS_pidfd_open, memory->pid, 0);

	if (fd < 0)
		return err_raise_errno(errno, "shm: a pidfd of process %d",
				       (int)memory->pid);
	/* it was alive after that: the number has not gone to another */
	if (memory_owner_alive(memory))
		return fd;
	close(fd);
	return err_raise(ERR_IMPORT, "shm: process %d is gone", (int)memory->pid);
}

void shm_vm_key_give(struct shm_peer *peer, uint64_t id, struct memory *memory)
{
	int fd = pidfd_of(memory);
	uint8_t body[16];
	struct cursor c;
	struct err err;

	if (fd < 0) {
		err_take(&err);
		shm_send_err(peer, SHM_KEY_DENY, id, &err);
		return;
	}
	cursor_write(&c, body, sizeof(body));
	cursor_put_u64(&c, memory->address);
	cursor_put_u64(&c, memory->length);
	shm_send(peer, &(struct shm_frame){.type = SHM_KEY_GIVE_VM,
					   .id = id,
					   .body = body,
					   .body_len = sizeof(body),
					   .fd = fd});
}

/* ---- the asking side ---- */

static int peer_user(const struct shm_peer *peer, uid_t *uid_p)
{
	struct ucred cred;
	socklen_t len = sizeof(cred);

	if (getsockopt(peer->fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0)
		return err_raise_errno(errno, "shm: SO_PEERCRED");
	*uid_p = cred.uid;
	return 0;
}

int shm_on_key_give_vm(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	uint64_t address = cursor_get_u64(c), length = cursor_get_u64(c);
	struct shm_key *key = NULL;
	int r = shm_key_answered(peer, f->id, &key);

	if (r == 0 && !key->vm)
		r = err_raise(ERR_PROTO, "private memory for a key of a file");
	if (r == 0)
		r = peer_user(peer, &key->vm_user);
	if (r < 0)
		return err_pass(r);
	key->kind = MEMORY_VM;
	key->offset = address;
	shm_key_given(key, length, shm_wire_take_fd(peer));
	return 0;
}

/* A line "Name:\tnumbers" of a file of /proc: its numbers. */
static int proc_numbers(const char *path, const char *name, long *numbers, int count)
{
	char text[4096], *at;
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);

	if (n < 0)
		return err_raise_errno(errno, "%s", path);
	text[n] = '\0';
	at = strstr(text, name);
	if (!at || (at != text && at[-1] != '\n'))
		return err_raise(ERR_IMPORT, "%s tells no %s", path, name);
	at += strlen(name);
	for (int i = 0; i < count; i++)
		numbers[i] = strtol(at, &at, 10);
	return 0;
}

static int pid_of(int pidfd, pid_t *pid_p)
{
	char path[64];
	long pid = 0;
	int r;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", pidfd);
	r = proc_numbers(path, "Pid:", &pid, 1);
	if (r < 0)
		return err_pass(r);
	if (pid <= 0)
		return err_raise(ERR_IMPORT, "the process is gone or in another pid "
					     "namespace");
	*pid_p = (pid_t)pid;
	return 0;
}

int shm_vm_check_user(pid_t pid, uid_t user)
{
	long uids[4] = {-1, -1, -1, -1};
	struct stat st;
	char path[64];
	int r;

	if (user == 0)
		return 0; /* it may read all of them */
	snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
	if (stat(path, &st) < 0)
		return err_raise_errno(errno, "%s", path);
	snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
	r = proc_numbers(path, "Uid:", uids, 4);
	if (r < 0)
		return err_pass(r);
	for (int i = 0; i < 4; i++)
		if (uids[i] != (long)user || st.st_uid != user)
			return err_raise(ERR_IMPORT, "process %d is not user %u's",
					 (int)pid, (unsigned int)user);
	return 0;
}

static int shm_vm_do_map(struct shm_key *key)
{
	struct pollfd gone = {.fd = key->fd, .events = POLLIN};
	pid_t pid = 0;
	int r = pid_of(key->fd, &pid);

	if (r == 0)
		r = shm_vm_check_user(pid, key->vm_user);
	if (r == 0)
		r = memory_import_vm(pid, key->offset, key->length, &key->memory);
	if (r < 0)
		return err_pass(r);
	key->memory->writable = false;
	/* it is not over after all that: the number was its own all the time */
	if (poll(&gone, 1, 0) == 0)
		return 0;
	memory_unref(key->memory);
	key->memory = NULL;
	return err_raise(ERR_IMPORT, "process %d is gone", (int)pid);
}

void shm_vm_map(struct shm_key *key)
{
	if (shm_vm_do_map(key) == 0)
		return;
	log_debug("shm", NULL, "private memory goes through the ring", "why=\"%s\"",
		  err_last()->text);
	err_clear();
}

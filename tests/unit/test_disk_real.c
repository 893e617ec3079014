/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What only a real disk can be asked: the order of its calls, faults of those, file
 * systems that are full, a device that hangs, names that others made.
 *
 * Calls of libc's are this program's own here, and go on to the kernel.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "tests/lib/disk_rig.h"
#include "tests/lib/tmp.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)

/* ---- libc's calls ---- */

static pthread_mutex_t calls_lock = PTHREAD_MUTEX_INITIALIZER; /* calls, call, no */
static char calls[256]; /* in order, by a word each */
static struct {
	const char *call; /* fails, or NULL */
	int no;
	bool brief; /* reads and writes are cut short, in odd places, and interrupted */
	unsigned int count;
} trouble;

static bool call_fails(const char *call)
{
	size_t len;
	bool fails;
	int no;

	pthread_mutex_lock(&calls_lock);
	len = strlen(calls);
	snprintf(calls + len, sizeof(calls) - len, "%s%s", len ? " " : "", call);
	fails = trouble.call && strcmp(call, trouble.call) == 0;
	no = trouble.no;
	pthread_mutex_unlock(&calls_lock);
	if (fails)
		errno = no;
	return fails;
}

static sem_t gate;
static unsigned int at_gates;
static bool stat_waits; /* at the gate */

static void at_gate(struct disk_op *op)
{
	(void)op;
	__atomic_add_fetch(&at_gates, 1, __ATOMIC_RELEASE);
	while (sem_wait(&gate) < 0)
		continue;
	sem_post(&gate);
}

int fstat(int fd, struct stat *st)
{
	if (__atomic_load_n(&stat_waits, __ATOMIC_ACQUIRE))
		at_gate(NULL);
	return fstatat(fd, "", st, AT_EMPTY_PATH);
}

int fdatasync(int fd)
{
	return call_fails("fdatasync") ? -1 : (int)syscall(SYS_fdatasync, fd);
}

int fsync(int fd)
{
	struct stat st;
	bool dir = fstat(fd, &st) == 0 && S_ISDIR(st.st_mode);

	return call_fails(dir ? "fsync-dir" : "fsync") ? -1 : (int)syscall(SYS_fsync, fd);
}

int renameat(int from, const char *old, int to, const char *new)
{
	return call_fails("renameat")
		       ? -1
		       : (int)syscall(SYS_renameat2, from, old, to, new, 0);
}

int fallocate(int fd, int mode, off_t at, off_t bytes)
{
	return call_fails("fallocate") ? -1
				       : (int)syscall(SYS_fallocate, fd, mode, at, bytes);
}

static int cut_short(struct iovec *iov, int count)
{
	unsigned int n = __atomic_add_fetch(&trouble.count, 1, __ATOMIC_RELAXED);

	if (n % 4 == 0) {
		errno = EINTR;
		return -1;
	}
	if (count > 1)
		return 1;
	if (n % 4 == 1 && iov->iov_len > 8 * KIB)
		iov->iov_len -= 4 * KIB;
	return 1;
}

ssize_t preadv2(int fd, const struct iovec *iov, int count, off_t at, int flags)
{
	struct iovec own[2] = {iov[0], count > 1 ? iov[1] : (struct iovec){0}};

	if (call_fails("preadv2"))
		return -1;
	if (trouble.brief && (count = cut_short(own, count)) < 0)
		return -1;
	return syscall(SYS_preadv2, fd, own, (long)count, (long)at, 0L, (long)flags);
}

ssize_t pwritev2(int fd, const struct iovec *iov, int count, off_t at, int flags)
{
	struct iovec own[2] = {iov[0], count > 1 ? iov[1] : (struct iovec){0}};

	if (call_fails("pwritev2"))
		return -1;
	if (trouble.brief && (count = cut_short(own, count)) < 0)
		return -1;
	return syscall(SYS_pwritev2, fd, own, (long)count, (long)at, 0L, (long)flags);
}

static void fail_call(const char *call, int no)
{
	pthread_mutex_lock(&calls_lock);
	trouble.call = call;
	trouble.no = no;
	calls[0] = '\0';
	pthread_mutex_unlock(&calls_lock);
}

static bool has_calls(const char *words)
{
	bool same;

	pthread_mutex_lock(&calls_lock);
	same = strcmp(calls, words) == 0;
	if (!same)
		print_message("calls: %s\n", calls);
	calls[0] = '\0';
	pthread_mutex_unlock(&calls_lock);
	return same;
}

/* ---- what lasts ---- */

static void name_appears_after_content_is_flushed(void **state)
{
	char text[] = "a class";
	struct disk_rig rig;
	struct rig_op op;

	rig_begin(&rig, *state);
	fail_call(NULL, 0);
	op = rig_make(1, 4 * KIB, MIB);
	rig_good(&rig, &op);
	assert_true(has_calls("fallocate fdatasync renameat fsync-dir"));
	op = rig_named(DISK_NAMED_WRITE, "c", text, sizeof(text));
	rig_good(&rig, &op);
	assert_true(has_calls("fdatasync renameat fsync-dir"));
	op = rig_file(DISK_SYNC, 1, 4 * KIB);
	rig_good(&rig, &op);
	assert_true(has_calls("fdatasync"));
	op = rig_file(DISK_REMOVE, 1, 4 * KIB);
	rig_good(&rig, &op);
	assert_true(has_calls("fsync-dir"));
	op = rig_named(DISK_NAMED_REMOVE, "c", NULL, 0);
	rig_good(&rig, &op);
	assert_true(has_calls("fsync-dir"));
	rig_end(&rig);
}

static unsigned int entries_of(const char *path)
{
	DIR *dir = opendir(path);
	unsigned int count = 0;

	assert_non_null(dir);
	while (readdir(dir))
		count++;
	closedir(dir);
	return count - 2; /* ., .. */
}

static void creation_failed_leaves_no_file(void **state)
{
	static const struct {
		const char *call;
		int no;
		enum err_code code;
		const char *words;
	} faults[] = {
		{"fallocate", ENOSPC, ERR_LIMIT, "No space left"},
		{"fallocate", EDQUOT, ERR_LIMIT, "quota"},
		{"fallocate", EOPNOTSUPP, ERR_IO, "does not reserve space"},
		{"fdatasync", EIO, ERR_IO, "00007.4096.slab: Input/output error"},
		{"renameat", EIO, ERR_IO, "Input/output error"},
		{"fsync-dir", EIO, ERR_IO, "Input/output error"},
	};
	struct disk_rig rig;
	struct rig_op op;

	rig_begin(&rig, *state);
	for (size_t i = 0; i < ARRAY_LEN(faults); i++) {
		fail_call(faults[i].call, faults[i].no);
		op = rig_make(7, 4 * KIB, MIB);
		rig_bad(&rig, &op, faults[i].code, faults[i].words);
		assert_non_null(strstr(op.op.err.text, rig.path));
		assert_int_equal(entries_of(rig.path), 1);
	}
	fail_call("fsync-dir", EINVAL); /* of a file system that has none */
	rig_good(&rig, &op);
	fail_call(NULL, 0);
	rig_end(&rig);
}

static void failed_named_write_keeps_the_old_content(void **state)
{
	char was[] = "the old one", is[] = "the new one", read[32];
	struct disk_rig rig;
	struct rig_op op;

	rig_begin(&rig, *state);
	op = rig_named(DISK_NAMED_WRITE, "c", was, sizeof(was));
	rig_good(&rig, &op);
	for (unsigned int i = 0; i < 2; i++) {
		fail_call(i ? "renameat" : "fdatasync", EIO);
		op = rig_named(DISK_NAMED_WRITE, "c", is, sizeof(is));
		rig_bad(&rig, &op, ERR_IO, "c.desc: Input/output error");
		op = rig_named(DISK_NAMED_READ, "c", read, sizeof(read));
		rig_good(&rig, &op);
		assert_string_equal(read, was);
		assert_int_equal(entries_of(rig.path), 2);
	}
	fail_call(NULL, 0);
	rig_end(&rig);
}

/* ---- pieces ---- */

static void device_fault_names_file_and_offset(void **state)
{
	uint8_t *m = rig_memory(2 * MIB);
	struct disk_figures figures;
	struct disk_rig rig;
	struct rig_op op;

	rig_begin(&rig, *state);
	op = rig_make(3, MIB, 8 * MIB);
	rig_good(&rig, &op);
	fail_call("preadv2", EIO);
	op = rig_move(DISK_READ, 3, MIB, MIB, m, MIB, 4 * KIB);
	rig_bad(&rig, &op, ERR_IO,
		"00003.1048576.slab at offset 1048576: Input/output error");
	fail_call("pwritev2", EIO);
	op = rig_move(DISK_WRITE, 3, MIB, 4 * MIB, m, 2 * MIB, 4 * KIB);
	rig_bad(&rig, &op, ERR_IO, ": Input/output error");
	fail_call("fdatasync", EIO);
	op = rig_file(DISK_SYNC, 3, MIB);
	rig_bad(&rig, &op, ERR_IO, "00003.1048576.slab: Input/output error");
	fail_call("pwritev2", ENOSPC);
	op = rig_move(DISK_WRITE, 3, MIB, 0, m, MIB, 4 * KIB);
	rig_bad(&rig, &op, ERR_LIMIT, "at offset 0: No space left");
	fail_call("pwritev2", EINTR); /* for ever */
	rig_bad(&rig, &op, ERR_IO, "Interrupted");
	fail_call(NULL, 0);
	rig_good(&rig, &op);
	disk_figures(rig.disk, &figures);
	assert_int_equal(figures.errors, 4);
	assert_int_equal(figures.writes, 1);
	rig_end(&rig);
	rig_memory_free(m, 2 * MIB);
}

static void transfers_short_are_continued(void **state)
{
	uint8_t *m = rig_memory(5 * MIB);
	struct disk_rig rig;
	struct rig_op op;

	rig_begin(&rig, *state);
	op = rig_make(3, 5 * MIB, 5 * MIB);
	rig_good(&rig, &op);
	rig_fill(m, 5 * MIB, 4);
	trouble.brief = true;
	op = rig_move(DISK_WRITE, 3, 5 * MIB, 0, m, 5 * MIB, 12 * KIB);
	rig_good(&rig, &op);
	memset(m, 0, 5 * MIB);
	op = rig_move(DISK_READ, 3, 5 * MIB, 0, m, 5 * MIB, 4 * KIB);
	rig_good(&rig, &op);
	trouble.brief = false;
	assert_true(rig_is(m, 5 * MIB, 4));
	rig_end(&rig);
	rig_memory_free(m, 5 * MIB);
}

static void file_truncated_is_too_short(void **state)
{
	uint8_t *m = rig_memory(MIB);
	char path[128];
	struct disk_rig rig;
	struct rig_op op;

	rig_begin(&rig, *state);
	op = rig_make(3, MIB, MIB);
	rig_good(&rig, &op);
	snprintf(path, sizeof(path), "%s/00003.1048576.slab", rig.path);
	assert_int_equal(truncate(path, 6000), 0);
	op = rig_move(DISK_READ, 3, MIB, 0, m, MIB, 4 * KIB);
	rig_bad(&rig, &op, ERR_IO, "is shorter than expected at offset 4096");
	op = rig_move(DISK_READ, 3, MIB, 0, m, 4 * KIB, 4 * KIB);
	rig_good(&rig, &op);
	rig_end(&rig);
	rig_memory_free(m, MIB);
}

/* ---- a full file system ---- */

static void need_small_tmpfs(const char *path, const char *options)
{
	/* threads that come later are in it, too */
	if (unshare(CLONE_NEWNS) == 0 &&
	    mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
	    mount("kvd-test", path, "tmpfs", 0, options) == 0)
		return;
	print_message("needs to mount a tmpfs (root): %s\n", strerror(errno));
	rmdir(path);
	skip();
}

static void full_file_system_is_reported_and_unchanged(void **state)
{
	char path[64], text[] = "old", slab[128], read[8];
	uint8_t *m = rig_memory(8 * MIB);
	struct disk_list list;
	struct disk_rig rig;
	struct rig_op op;

	assert_non_null(mkdtemp(tmp_path(path, sizeof(path), "disk-XXXXXX")));
	need_small_tmpfs(path, "size=8m,mode=700");
	rig_begin_at(&rig, *state, path);
	op = rig_named(DISK_NAMED_WRITE, "c", text, sizeof(text));
	rig_good(&rig, &op);
	op = rig_make(1, MIB, 16 * MIB);
	rig_bad(&rig, &op, ERR_LIMIT, "00001.1048576.slab: No space left on device");
	op = rig_file(DISK_LIST, 0, 0);
	op.op.list = &list;
	rig_good(&rig, &op);
	assert_int_equal(list.slab_count, 0);
	disk_list_fini(&list);
	assert_int_equal(entries_of(path), 2);
	op = rig_make(1, MIB, 6 * MIB);
	rig_good(&rig, &op);
	/* a file with holes, which is not ours to make */
	snprintf(slab, sizeof(slab), "%s/00002.1048576.slab", path);
	close(open(slab, O_RDWR | O_CREAT, 0600));
	assert_int_equal(truncate(slab, 16 * MIB), 0);
	op = rig_move(DISK_WRITE, 2, MIB, 8 * MIB, m, 8 * MIB, 4 * KIB);
	rig_bad(&rig, &op, ERR_LIMIT, "00002.1048576.slab at offset ");
	assert_non_null(strstr(op.op.err.text, "No space left on device"));
	op = rig_named(DISK_NAMED_WRITE, "c", m, MIB);
	rig_bad(&rig, &op, ERR_LIMIT, "c.desc: No space left on device");
	op = rig_named(DISK_NAMED_READ, "c", read, sizeof(read));
	rig_good(&rig, &op);
	assert_string_equal(read, text);
	op = rig_file(DISK_REMOVE, 2, MIB);
	rig_good(&rig, &op);
	op = rig_move(DISK_WRITE, 1, MIB, 0, m, 6 * MIB, 4 * KIB);
	rig_good(&rig, &op);
	rig_close(&rig);
	assert_int_equal(umount2(path, MNT_DETACH), 0);
	rig_end(&rig);
	rig_memory_free(m, 8 * MIB);
}

/* ---- names ---- */

/* A READ has opened its file when that is removed and another one made in its place. */
static void file_recreated_is_not_the_removed_one(void **state)
{
	uint8_t *m = rig_memory(4 * KIB), *r = rig_memory(4 * KIB);
	struct rig_op op, read;
	struct disk_rig rig;

	rig_begin(&rig, *state);
	assert_int_equal(sem_init(&gate, 0, 0), 0);
	at_gates = 0;
	op = rig_make(1, 4 * KIB, 4 * KIB);
	rig_good(&rig, &op);
	__atomic_store_n(&stat_waits, true, __ATOMIC_RELEASE);
	read = rig_move(DISK_READ, 1, 4 * KIB, 0, r, 4 * KIB, 4 * KIB);
	rig_submit(&rig, &read);
	rig_until(&rig, &at_gates);
	__atomic_store_n(&stat_waits, false, __ATOMIC_RELEASE);
	op = rig_file(DISK_REMOVE, 1, 4 * KIB);
	rig_good(&rig, &op);
	op = rig_make(1, 4 * KIB, 4 * KIB);
	rig_good(&rig, &op);
	sem_post(&gate);
	rig_until(&rig, &read.order);
	assert_int_equal(read.op.result, 0);
	rig_fill(m, 4 * KIB, 1);
	op = rig_move(DISK_WRITE, 1, 4 * KIB, 0, m, 4 * KIB, 4 * KIB);
	rig_good(&rig, &op);
	rig_close(&rig);
	rig_open(&rig);
	op = rig_move(DISK_READ, 1, 4 * KIB, 0, r, 4 * KIB, 4 * KIB);
	rig_good(&rig, &op);
	assert_true(rig_is(r, 4 * KIB, 1));
	rig_end(&rig);
	sem_destroy(&gate);
	rig_memory_free(m, 4 * KIB);
	rig_memory_free(r, 4 * KIB);
}

static void put(const struct disk_rig *rig, const char *name)
{
	char path[128];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", rig->path, name);
	fd = open(path, O_WRONLY | O_CREAT, 0600);
	assert_true(fd >= 0);
	close(fd);
}

static bool is_there(const struct disk_rig *rig, const char *name)
{
	char path[128];

	snprintf(path, sizeof(path), "%s/%s", rig->path, name);
	return faccessat(AT_FDCWD, path, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

static void leftovers_are_removed_and_foreign_files_kept(void **state)
{
	static const char *const ours[] = {"00001.4096.slab.tmp", "c.desc.tmp"};
	static const char *const others[] = {
		"notes.txt",	    "foo.tmp",
		"1.4096.slab",	    "00001.slab",
		"00001.04096.slab", "00001.0.slab",
		"00001.4096.slab2", "4294967296.4096.slab",
		"a.b.desc",	    ".desc",
		"-1.4096.slab",	    "00001.99999999999999999999.slab"};
	char dir[128], link[128], fifo[128];
	uint8_t *m = rig_memory(4 * KIB);
	struct disk_list list;
	struct disk_rig rig;
	struct rig_op op;

	rig_begin(&rig, *state);
	rig_close(&rig);
	for (size_t i = 0; i < ARRAY_LEN(ours); i++)
		put(&rig, ours[i]);
	for (size_t i = 0; i < ARRAY_LEN(others); i++)
		put(&rig, others[i]);
	put(&rig, "4294967295.18446744073709551615.slab");
	put(&rig, "c.desc");
	snprintf(dir, sizeof(dir), "%s/00007.4096.slab", rig.path);
	snprintf(link, sizeof(link), "%s/00008.4096.slab", rig.path);
	snprintf(fifo, sizeof(fifo), "%s/00009.4096.slab", rig.path);
	assert_int_equal(mkdir(dir, 0700), 0);
	assert_int_equal(symlink("/etc/passwd", link), 0);
	assert_int_equal(mkfifo(fifo, 0600), 0);
	rig_open(&rig);
	for (size_t i = 0; i < ARRAY_LEN(ours); i++)
		assert_false(is_there(&rig, ours[i]));
	for (size_t i = 0; i < ARRAY_LEN(others); i++)
		assert_true(is_there(&rig, others[i]));
	op = rig_file(DISK_LIST, 0, 0);
	op.op.list = &list;
	rig_good(&rig, &op);
	assert_int_equal(list.slab_count, 1);
	assert_int_equal(list.slabs[0].file.number, UINT32_MAX);
	assert_true(list.slabs[0].file.slot_bytes == UINT64_MAX);
	assert_int_equal(list.named_count, 1);
	assert_string_equal(list.named[0].name, "c");
	disk_list_fini(&list);
	for (uint32_t i = 7; i < 10; i++) { /* and do not hang */
		op = rig_move(DISK_READ, i, 4 * KIB, 0, m, 4 * KIB, 4 * KIB);
		rig_bad(&rig, &op, ERR_IO, ".4096.slab");
	}
	assert_int_equal(rmdir(dir), 0);
	rig_end(&rig);
	rig_memory_free(m, 4 * KIB);
}

static void directory_unusable_is_named(void **state)
{
	struct disk_rig rig;
	char path[128];

	rig_begin(&rig, *state);
	rig_close(&rig);
	rig.args.path = path;
	snprintf(path, sizeof(path), "%s/none", rig.path);
	rig_open(&rig);
	assert_int_equal(rig.why.code, ERR_NOTFOUND);
	assert_non_null(strstr(rig.why.text, path));
	rig_close(&rig);
	put(&rig, "file");
	snprintf(path, sizeof(path), "%s/file", rig.path);
	rig_open(&rig);
	assert_int_equal(rig.why.code, ERR_IO);
	assert_non_null(strstr(rig.why.text, "Not a directory"));
	rig_close(&rig);
	/* none of ours is made in the place of a link */
	rig.args.path = rig.path;
	snprintf(path, sizeof(path), "%s/lock", rig.path);
	assert_int_equal(unlink(path), 0);
	assert_int_equal(symlink("elsewhere", path), 0);
	rig_open(&rig);
	assert_int_equal(rig.why.code, ERR_IO);
	assert_false(is_there(&rig, "elsewhere"));
	rig_end(&rig);
}

/* Whoever else may enter it, or owns it. */
static void directory_of_others_is_refused(void **state)
{
	static const mode_t modes[] = {0755, 0750, 0701, 0720, 01777};
	struct disk_rig rig;
	char mode[32];

	rig_begin(&rig, *state);
	for (size_t i = 0; i < ARRAY_LEN(modes); i++) {
		rig_close(&rig);
		assert_int_equal(chmod(rig.path, modes[i]), 0);
		rig_open(&rig);
		assert_int_equal(rig.why.code, ERR_PERM);
		snprintf(mode, sizeof(mode), "mode %04o", modes[i]);
		assert_non_null(strstr(rig.why.text, mode));
		assert_non_null(strstr(rig.why.text, "chmod 0700"));
	}
	rig_close(&rig);
	assert_int_equal(chmod(rig.path, 0700), 0);
	if (geteuid() == 0) { /* others cannot give theirs away */
		assert_int_equal(chown(rig.path, 12345, (gid_t)-1), 0);
		rig_open(&rig);
		assert_int_equal(rig.why.code, ERR_PERM);
		assert_non_null(strstr(rig.why.text, "uid 12345"));
		rig_close(&rig);
		assert_int_equal(chown(rig.path, geteuid(), (gid_t)-1), 0);
	}
	rig_open(&rig);
	assert_int_equal(rig.why.code, ERR_OK);
	rig_end(&rig);
}

static void taken_directory_names_its_holder(void **state)
{
	struct disk_rig rig, other;
	char words[32];

	rig_begin(&rig, *state);
	rig_begin(&other, *state);
	rig_close(&other);
	other.args.path = rig.path;
	rig_open(&other);
	assert_int_equal(other.why.code, ERR_BUSY);
	snprintf(words, sizeof(words), "(process %d)", (int)getpid());
	assert_non_null(strstr(other.why.text, words));
	rig_end(&other);
	rig_end(&rig);
}

/* A daemon that was killed is on its way out when the next one comes. */
static void opener_waits_for_ending_holder(void **state)
{
	struct disk_rig rig;
	char path[128];
	int fd;

	rig_begin(&rig, *state);
	rig_close(&rig);
	snprintf(path, sizeof(path), "%s/lock", rig.path);
	fd = open(path, O_RDWR);
	assert_true(fd >= 0);
	assert_int_equal(flock(fd, LOCK_EX), 0);
	rig.opened = false;
	assert_int_equal(disk_open(rig.loop, &rig.args, &rig.disk), 0);
	for (unsigned int i = 0; i < 5; i++)
		rig_turn(&rig);
	assert_false(rig.opened);
	close(fd);
	while (!rig.opened)
		rig_turn(&rig);
	assert_int_equal(rig.why.code, ERR_OK);
	rig_end(&rig);
}

static void disk_cached_is_not_direct(void **state)
{
	const struct disk_impl *impl = *state;
	struct disk_rig rig;

	rig_begin(&rig, impl);
	if (impl->cached)
		assert_false(disk_direct(rig.disk));
	print_message("%s: %s\n", impl->name,
		      disk_direct(rig.disk) ? "O_DIRECT" : "by the page cache");
	rig_end(&rig);
}

/* ---- a device that hangs ---- */

static unsigned int threads_now(void)
{
	return entries_of("/proc/self/task");
}

static void device_hanging_is_abandoned(void **state)
{
	static struct rig_op all_hung[8], queued[20];
	static unsigned int hung_count; /* each stays its disk's for good */
	uint8_t *m = rig_memory(4 * KIB);
	unsigned int threads = threads_now();
	struct disk_rig rig;
	struct rig_op op, *hung;
	uint64_t from;

	for (unsigned int round = 0; round < 2; round++) {
		assert_true(hung_count < ARRAY_LEN(all_hung));
		hung = &all_hung[hung_count++];
		rig_begin(&rig, *state);
		assert_int_equal(sem_init(&gate, 0, 0), 0);
		op = rig_make(1, 4 * KIB, MIB);
		rig_good(&rig, &op);
		rig_close(&rig);
		rig.args.stop_ns = 50 * LOOP_NS_PER_MS;
		rig_open(&rig);
		__atomic_store_n(&at_gates, 0, __ATOMIC_RELAXED);
		*hung = round ? rig_file(DISK_SYNC, 1, 4 * KIB)
			      : rig_move(DISK_READ, 1, 4 * KIB, 0, m, 4 * KIB, 4 * KIB);
		hung->op.before = at_gate;
		op = *hung;
		rig_submit(&rig, hung);
		rig_until(&rig, &at_gates);
		for (size_t i = 0; i < ARRAY_LEN(queued); i++) {
			queued[i] = op;
			queued[i].op.before = NULL;
			rig_submit(&rig, &queued[i]);
		}
		from = clock_ns();
		assert_int_equal(disk_free(rig.disk), DISK_ABANDONED);
		rig.disk = NULL;
		assert_true(clock_ns() - from >= 50 * LOOP_NS_PER_MS);
		assert_int_equal(hung->order, 0);
		for (size_t i = 0; i < ARRAY_LEN(queued); i++)
			assert_true(queued[i].order > 0);
		sem_post(&gate); /* it does come back, and touches nothing of ours */
		while (threads_now() > threads)
			sched_yield();
		assert_int_equal(hung->order, 0);
		sem_destroy(&gate);
		rig_end(&rig);
	}
	rig_memory_free(m, 4 * KIB);
}

/* ---- no memory ---- */

static void disk_opened_without_memory_is_not_there(void **state)
{
	struct disk_rig rig;
	int64_t live;
	int r = -1;

	rig_begin(&rig, *state);
	rig_close(&rig);
	live = mem_live();
	for (uint64_t n = 1; r < 0; n++) {
		assert_true(n < 20);
		mem_fail_at(n);
		r = disk_open(rig.loop, &rig.args, &rig.disk);
		mem_fail_at(0);
		if (r < 0) {
			assert_int_equal(err_last()->code, ERR_NOMEM);
			assert_int_equal(mem_live(), live);
		}
	}
	rig_end(&rig);
}

static uint64_t fail_at;

static void memory_fails(struct disk_op *op)
{
	(void)op;
	mem_fail_at(fail_at);
}

static void list_without_memory_is_refused(void **state)
{
	struct disk_list list;
	struct disk_rig rig;
	struct rig_op op;
	char name[8];

	rig_begin(&rig, *state);
	for (uint32_t i = 0; i < 20; i++) {
		snprintf(name, sizeof(name), "c%u", i);
		op = rig_named(DISK_NAMED_WRITE, name, name, sizeof(name));
		rig_good(&rig, &op);
	}
	op = rig_make(1, 4 * KIB, 4 * KIB);
	rig_good(&rig, &op);
	op = rig_file(DISK_LIST, 0, 0);
	op.op.list = &list;
	op.op.before = memory_fails;
	for (fail_at = 1; rig_do(&rig, &op) < 0; fail_at++) {
		assert_int_equal(op.op.err.code, ERR_NOMEM);
		assert_null(list.slabs);
		assert_null(list.named);
	}
	assert_int_equal(fail_at, 4); /* two arrays, one of which grew */
	assert_int_equal(list.named_count, 20);
	disk_list_fini(&list);
	fail_at = 0;
	rig_good(&rig, &op);
	disk_list_fini(&list);
	rig_end(&rig);
}

int main(void)
{
	static const struct rig_case cases[] = {
#define CASE(fn) {#fn, fn}
		CASE(disk_cached_is_not_direct),
		CASE(name_appears_after_content_is_flushed),
		CASE(creation_failed_leaves_no_file),
		CASE(failed_named_write_keeps_the_old_content),
		CASE(file_truncated_is_too_short),
		CASE(leftovers_are_removed_and_foreign_files_kept),
		CASE(file_recreated_is_not_the_removed_one),
		CASE(directory_unusable_is_named),
		CASE(directory_of_others_is_refused),
		CASE(taken_directory_names_its_holder),
		CASE(opener_waits_for_ending_holder),
		CASE(device_hanging_is_abandoned),
		CASE(disk_opened_without_memory_is_not_there),
		CASE(list_without_memory_is_refused),
		CASE(full_file_system_is_reported_and_unchanged),
		CASE(device_fault_names_file_and_offset),
		CASE(transfers_short_are_continued),
	};
#undef CASE
	static const struct disk_impl impls[] = {
		{.name = "threads"},
		{.name = "threads, cached", .cached = true},
	};

	rig_add(cases, ARRAY_LEN(cases), impls, ARRAY_LEN(impls));
	return rig_run();
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Paths. The secret is stored in keys_dir, else in systemd's StateDirectory, where it
 * survives a boot, else in keys-UID in run_dir. The public key is published in keys_dir;
 * without that option in keys-UID in run_dir, which containers may share, and in
 * /dev/shm/kvd-keys-UID, which is the same for all run_dirs of a host. /dev/shm is open
 * to all users, so another user may create that name first: then a warning is logged and
 * only the directory in run_dir is used.
 *
 * A published key is a file with the key's bytes in hex as its name, so a look-up is one
 * open(). Its daemon holds a lock on it (flock), which the kernel releases with the
 * process: a file without a lock is of a daemon that has ended, and is removed by the
 * next reader. It is locked before it gets its name.
 *
 * One daemon, one pair: the directory of the secret has a lock for each name, since
 * daemons of several run_dirs may share it. The pair is written under that lock to a
 * temporary name and renamed, so a partial pair is never read.
 *
 * The loop opens these files. They are small, local, and owned by this user. Engines name
 * an endpoint for each room, so results are cached: a key forever, since a dialled daemon
 * must prove that it has it; the owner of HOST:PORT for a second; that it has none until
 * a directory changes. Else every attempt to reach a remote daemon would read the file of
 * each local one.
 */
#include "daemon/link/link_keydir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include "daemon/base/openat2.h"
#include "daemon/base/clock.h"
#include "daemon/base/err.h"
#include "daemon/base/hex.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/loop/lock.h"

#define SHARED_PARENT "/dev/shm"
#define SHARED_PATH SHARED_PARENT "/kvd-keys-%u"
#define PLACES 2u
#define KEY_BYTES 32u
#define FILE_CHARS HEX_CHARS(KEY_BYTES)
#define LINE_BYTES 1024u
#define SEEN_MAX 64u
#define PLACED_MAX 64u
#define PLACED_NS UINT64_C(1000000000)
#define NOWHERE_NS (10 * PLACED_NS) /* a network's file system may show an old time */
#define TICK_NS UINT64_C(20000000)  /* times of files differ by ticks of the kernel */
#define LOOKED_AT 4096u		    /* files of a directory */
#define PATH_BYTES (CONFIG_PATH_BYTES + 96u)

struct place {
	char path[PATH_BYTES]; /* "": none */
	int dir;	       /* -1: not used */
	int shown;	       /* the file, locked; -1: none */
	bool unread;	       /* a search could not read all of it */
};

/* The recent owner of HOST:PORT. */
struct placed {
	char at[LINK_ENDPOINT_MAX];
	char key[CURVE_KEY_CHARS + 1]; /* "": none */
	uint64_t until_ns;
	uint64_t stamp; /* of the directories without an owner */
};

struct link_keydir {
	char name[CONFIG_NAME_BYTES];
	char home[PATH_BYTES], secret[PATH_BYTES];
	struct lock lock; /* of the name, in the home */
	struct place places[PLACES];
	char file[FILE_CHARS + 1]; /* "": nothing is shown */
	char line[LINE_BYTES];
	char seen[SEEN_MAX][CURVE_KEY_CHARS + 1]; /* found recently, in a ring */
	unsigned int seen_next;
	struct placed placed[PLACED_MAX]; /* a ring */
	unsigned int placed_next;
	uint64_t stamp, stamp_ns; /* of the directories, and since when */
};

/* ---- directories ---- */

/* In /dev/shm any user may have mounted a file system under that name whose server
 * never answers: entries of other users are not opened. */
static int dir_enter(const char *path)
{
	cleanup_close int fd = -1;

	if (strncmp(path, SHARED_PARENT "/", strlen(SHARED_PARENT) + 1) != 0)
		return open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	fd = openat2_path(SHARED_PARENT, path + strlen(SHARED_PARENT) + 1);
	return fd < 0 ? -1 : openat2_reopen(fd, O_RDONLY | O_DIRECTORY | O_NONBLOCK);
}

/* Owned by this user and writable only by it; created when missing. */
static int dir_open(const char *path, int *fd_p)
{
	cleanup_close int fd = -1;
	struct stat st;

	if (mkdir(path, 0700) < 0 && errno != EEXIST)
		return err_raise(ERR_CONFIG, "%s: %s", path, strerror(errno));
	fd = dir_enter(path);
	if (fd < 0 || fstat(fd, &st) < 0)
		return err_raise(ERR_CONFIG, "%s: %s", path, strerror(errno));
	if (st.st_uid != geteuid())
		return err_raise(ERR_CONFIG, "%s: belongs to uid %u, not to %u", path,
				 (unsigned int)st.st_uid, (unsigned int)geteuid());
	if (st.st_mode & (S_IWGRP | S_IWOTH))
		return err_raise(ERR_CONFIG,
				 "%s: mode %04o: must not be writable by others; chmod "
				 "go-w",
				 path, (unsigned int)st.st_mode & 07777);
	*fd_p = mem_steal_fd(&fd);
	return 0;
}

static void own_path(const struct config *config, char *path, size_t size)
{
	snprintf(path, size, "%.255s/keys-%u", config->run_dir, (unsigned int)geteuid());
}

void link_keydir_home(const struct config *config, char *path, size_t size)
{
	const char *state = getenv("STATE_DIRECTORY"); /* systemd.exec(5): a list */

	if (*config->keys_dir) {
		snprintf(path, size, "%s", config->keys_dir);
		(void)mkdir(path,
			    0700); /* on failure link_keydir_new() reports the cause */
	} else if (state && *state == '/')
		snprintf(path, size, "%.*s", (int)strcspn(state, ":"), state);
	else
		own_path(config, path, size);
}

static void resolve_paths(struct link_keydir *dir, const struct config *config)
{
	link_keydir_home(config, dir->home, sizeof(dir->home));
	if (*config->keys_dir) {
		snprintf(dir->places[0].path, PATH_BYTES, "%s", config->keys_dir);
	} else {
		own_path(config, dir->places[0].path, PATH_BYTES);
		snprintf(dir->places[1].path, PATH_BYTES, SHARED_PATH,
			 (unsigned int)geteuid());
	}
	snprintf(dir->secret, sizeof(dir->secret), "%.290s/%.50s.key", dir->home,
		 dir->name);
}

/* ---- the pair ---- */

/* Write it completely under its name, or not at all. */
static int file_put(int dir, const char *name, mode_t mode, const char *text)
{
	cleanup_close int fd = -1;
	char fresh[CONFIG_NAME_BYTES + 16];
	size_t len = strlen(text);

	snprintf(fresh, sizeof(fresh), ".%.70s.new", name);
	if (unlinkat(dir, fresh, 0) < 0 && errno != ENOENT)
		return -errno;
	fd = openat(dir, fresh, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
		    mode);
	if (fd < 0)
		return -errno;
	if (fchmod(fd, mode) == 0 && write(fd, text, len) == (ssize_t)len &&
	    fsync(fd) == 0 && renameat(dir, fresh, dir, name) == 0 && fsync(dir) == 0)
		return 0;
	int no = errno ? errno : ENOSPC;

	unlinkat(dir, fresh, 0);
	return -no;
}

static int pair_make(struct link_keydir *dir, int home)
{
	char public_key[CURVE_KEY_CHARS + 1], secret[CURVE_KEY_CHARS + 2];
	char name[CONFIG_NAME_BYTES + 8];
	int r;

	do { /* '#' starts a comment in the file */
		if (zmq_curve_keypair(public_key, secret) != 0)
			return err_raise(ERR_CONFIG, "a CURVE key pair: %s",
					 zmq_strerror(errno));
	} while (*secret == '#');
	secret[CURVE_KEY_CHARS] = '\n';
	secret[CURVE_KEY_CHARS + 1] = '\0';
	snprintf(name, sizeof(name), "%s.key", dir->name);
	r = file_put(home, name, 0600, secret);
	explicit_bzero(secret, sizeof(secret));
	if (r < 0)
		return err_raise(ERR_CONFIG, "%s: %s", dir->secret, strerror(-r));
	log_info("link", dir->secret, "key pair created", "public='%s'", public_key);
	return 0;
}

void link_keydir_name(const char *name, char out[LINK_USER_MAX])
{
	char host[LINK_USER_MAX] = "";
	size_t room = LINK_USER_MAX - 1, len = strlen(name);

	(void)gethostname(host, sizeof(host) - 1);
	host[strspn(host, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
			  "0123456789_-")] = '\0'; /* without the domain */
	room = len + 1 < room ? room - len - 1 : 0;
	if (*host && room)
		snprintf(out, LINK_USER_MAX, "%.*s.%s", (int)room, host, name);
	else
		snprintf(out, LINK_USER_MAX, "%s", name);
}

static void public_put(struct link_keydir *dir, int home, const char *key)
{
	char name[CONFIG_NAME_BYTES + 8], text[LINK_USER_MAX + CURVE_KEY_CHARS + 4];
	char user[LINK_USER_MAX];
	int r;

	link_keydir_name(dir->name, user);
	snprintf(name, sizeof(name), "%s.pub", dir->name);
	snprintf(text, sizeof(text), "%s %s\n", user, key);
	r = file_put(home, name, 0644, text);
	if (r < 0)
		log_warn("link", dir->home, "public key not written",
			 "file=%s why=\"%s\"", name, strerror(-r));
}

static int pair_take(struct link_keydir *dir, struct curve_keys *keys_p)
{
	cleanup_close int home = -1;
	int r = dir_open(dir->home, &home);

	if (r == 0 && faccessat(AT_FDCWD, dir->home, W_OK | X_OK, AT_EACCESS) < 0)
		r = err_raise(ERR_CONFIG, "%s: %s", dir->home, strerror(errno));
	if (r == 0)
		r = lock_take(&dir->lock, dir->home, dir->name);
	if (r == 0 && access(dir->secret, F_OK) < 0 && errno == ENOENT)
		r = pair_make(dir, home);
	if (r == 0)
		r = curve_keys_load(dir->secret, keys_p);
	if (r == 0)
		public_put(dir, home, keys_p->public_key);
	if (r == 0 || err_last()->code == ERR_BUSY)
		return err_pass(r);
	return err_raise(ERR_CONFIG,
			 "%.230s: no directory for this daemon's key; set keys_dir or "
			 "curve_secret_file, or insecure = yes to run without keys",
			 err_last()->text);
}

/* ---- showing ---- */

static void place_hide(struct link_keydir *dir, struct place *place)
{
	struct stat own, now;

	if (place->shown < 0)
		return;
	/* while it is locked; not a successor's */
	if (fstat(place->shown, &own) == 0 &&
	    fstatat(place->dir, dir->file, &now, AT_SYMLINK_NOFOLLOW) == 0 &&
	    own.st_ino == now.st_ino && own.st_dev == now.st_dev)
		unlinkat(place->dir, dir->file, 0);
	close(place->shown);
	place->shown = -1;
}

/* Locked before it has its name. 0 or -errno. */
static int place_write(struct link_keydir *dir, struct place *place)
{
	char fresh[FILE_CHARS + 8];
	cleanup_close int fd = -1;
	size_t len = strlen(dir->line);

	snprintf(fresh, sizeof(fresh), ".%s.new", dir->file);
	unlinkat(place->dir, fresh, 0);
	fd = openat(place->dir, fresh,
		    O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (fd < 0)
		return -errno;
	if (flock(fd, LOCK_EX | LOCK_NB) == 0 &&
	    write(fd, dir->line, len) == (ssize_t)len &&
	    renameat(place->dir, fresh, place->dir, dir->file) == 0) {
		place->shown = mem_steal_fd(&fd);
		return 0;
	}
	int no = errno ? errno : ENOSPC;

	unlinkat(place->dir, fresh, 0);
	return -no;
}

static void place_show(struct link_keydir *dir, struct place *place)
{
	int r = 0;

	if (!*place->path)
		return;
	if (place->dir >= 0)
		close(place->dir);
	place->dir = -1;
	if (dir_open(place->path, &place->dir) == 0)
		r = place_write(dir, place);
	if (r < 0)
		err_raise(ERR_IO, "%s: %s", place->path, strerror(-r));
	if (place->dir < 0 || r < 0) {
		log_warn("link", place->path,
			 "not used: daemons of this user cannot find each other's keys "
			 "in it",
			 "why=\"%s\"", err_last()->text);
		err_clear();
	}
}

void link_keydir_show(struct link_keydir *dir, const char *key, const char *line)
{
	uint8_t bytes[KEY_BYTES];

	if (!zmq_z85_decode(bytes, key))
		return;
	hex_write(bytes, sizeof(bytes), dir->file);
	snprintf(dir->line, sizeof(dir->line), "%s\n", line);
	for (unsigned int i = 0; i < PLACES; i++)
		place_show(dir, &dir->places[i]);
}

/* Published keys may be removed with all of the user's files in /dev/shm: logind does
 * that when the user logs out. */
static void place_check(struct link_keydir *dir, struct place *place)
{
	struct stat st;

	if (place->shown < 0 || fstat(place->shown, &st) < 0 || st.st_nlink)
		return;
	close(place->shown);
	place->shown = -1;
	place_show(dir, place);
}

/* ---- look-up ---- */

/* The line of the file as a list; NULL: none, or its daemon has ended. */
static struct curve_allow *shown_read(struct place *place, const char *file)
{
	cleanup_close int fd = -1;
	struct curve_allow *allow = NULL;
	char text[LINE_BYTES];
	struct stat st, now;
	ssize_t n;

	if (place->dir < 0)
		return NULL;
	fd = openat(place->dir, file, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	place->unread |= fd < 0 && errno != ENOENT && errno != ELOOP;
	if (fd < 0 || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) ||
	    st.st_uid != geteuid())
		return NULL;
	if (flock(fd, LOCK_SH | LOCK_NB) == 0) {
		/* Its daemon has ended. The next one with the same key may have the name
		 * already. */
		if (fstatat(place->dir, file, &now, AT_SYMLINK_NOFOLLOW) == 0 &&
		    now.st_ino == st.st_ino)
			unlinkat(place->dir, file, 0);
		return NULL;
	}
	n = read(fd, text, sizeof(text) - 1);
	if (n <= 0)
		return NULL;
	text[n] = '\0';
	text[strcspn(text, "\n")] = '\0';
	allow = curve_allow_new();
	if (allow && curve_allow_add(allow, text) == 0)
		return allow;
	place->unread |= !allow;
	err_clear();
	curve_allow_free(allow);
	return NULL;
}

static struct curve_allow *key_read(struct link_keydir *dir, const char *key)
{
	char file[FILE_CHARS + 1];
	uint8_t bytes[KEY_BYTES];

	if (!dir || !curve_key_check(key, strlen(key)) || !zmq_z85_decode(bytes, key))
		return NULL;
	hex_write(bytes, sizeof(bytes), file);
	for (unsigned int i = 0; i < PLACES; i++) {
		place_check(dir, &dir->places[i]);
		struct curve_allow *allow = shown_read(&dir->places[i], file);

		if (allow && curve_allow_name(allow, key))
			return allow;
		curve_allow_free(allow);
	}
	return NULL;
}

bool link_keydir_seen(const struct link_keydir *dir, const char *key)
{
	for (unsigned int i = 0; dir && i < SEEN_MAX; i++) {
		if (strcmp(dir->seen[i], key) == 0)
			return true;
	}
	return false;
}

bool link_keydir_find(struct link_keydir *dir, const char *key, char name[LINK_USER_MAX])
{
	struct curve_allow *allow = key_read(dir, key);

	if (allow) {
		snprintf(name, LINK_USER_MAX, "%s", curve_allow_name(allow, key));
		if (!link_keydir_seen(dir, key))
			memcpy(dir->seen[dir->seen_next++ % SEEN_MAX], key,
			       CURVE_KEY_CHARS + 1);
	}
	curve_allow_free(allow);
	return allow != NULL;
}

bool link_keydir_tells(struct link_keydir *dir, const char *key, const char *host,
		       const char *port)
{
	struct curve_allow *allow = key_read(dir, key);
	bool tells = allow && curve_allow_key(allow, host, port);

	curve_allow_free(allow);
	return tells;
}

/* Every published key of a directory, until `each` returns true. */
static bool place_walk(struct place *place,
		       bool (*each)(void *arg, const struct curve_allow *allow),
		       void *arg)
{
	const struct dirent *entry;
	bool end = false;
	DIR *list;
	int fd = place->dir < 0
			 ? -1
			 : openat(place->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	list = fd < 0 ? NULL : fdopendir(fd);
	if (!list) {
		place->unread = place->dir >= 0;
		if (fd >= 0)
			close(fd);
		return false;
	}
	for (unsigned int i = 0; !end && i < LOOKED_AT && (entry = readdir(list)); i++) {
		struct curve_allow *allow = strlen(entry->d_name) == FILE_CHARS
						    ? shown_read(place, entry->d_name)
						    : NULL;

		end = allow && each(arg, allow);
		curve_allow_free(allow);
	}
	closedir(list);
	return end;
}

struct wanted {
	const char *host, *port;
	char *key;
};

static bool on_shown(void *arg, const struct curve_allow *allow)
{
	struct wanted *wanted = arg;
	const char *key = curve_allow_key(allow, wanted->host, wanted->port);

	if (key)
		memcpy(wanted->key, key, CURVE_KEY_CHARS + 1);
	return key != NULL;
}

/* Of the directories as they are: a new key is a new file. 0: the next one may have the
 * same time. */
static uint64_t dir_stamp(struct link_keydir *dir)
{
	uint64_t now_ns = clock_ns(), stamp = 1;
	struct stat st;

	for (unsigned int i = 0; i < PLACES; i++) {
		if (dir->places[i].dir < 0)
			continue;
		if (fstat(dir->places[i].dir, &st) < 0 || st.st_mtim.tv_nsec == 0)
			return 0;
		stamp = stamp * 31 + (uint64_t)st.st_mtim.tv_sec * CLOCK_NS_PER_S +
			(uint64_t)st.st_mtim.tv_nsec;
	}
	if (stamp != dir->stamp) {
		dir->stamp = stamp;
		dir->stamp_ns = now_ns;
	}
	return now_ns - dir->stamp_ns < TICK_NS ? 0 : stamp;
}

/* Is it still the owner? After a second that is read again: one file, where a search
 * reads all. */
static bool placed_stays(struct link_keydir *dir, struct placed *placed, const char *host,
			 const char *port)
{
	uint64_t now_ns = clock_ns();

	if (placed->until_ns >= now_ns &&
	    (*placed->key || placed->stamp == dir_stamp(dir)))
		return true;
	if (!*placed->key || !link_keydir_tells(dir, placed->key, host, port)) {
		placed->at[0] = '\0';
		return false;
	}
	placed->until_ns = now_ns + PLACED_NS;
	return true;
}

bool link_keydir_at(struct link_keydir *dir, const char *host, const char *port,
		    char key[CURVE_KEY_CHARS + 1])
{
	struct wanted wanted = {.host = host, .port = port, .key = key};
	struct placed placed = {.until_ns = clock_ns()};
	bool found = false;

	if (!dir)
		return false;
	snprintf(placed.at, sizeof(placed.at), "%.119s:%.7s", host, port);
	for (unsigned int i = 0; i < PLACED_MAX; i++) {
		if (strcmp(dir->placed[i].at, placed.at) != 0 ||
		    !placed_stays(dir, &dir->placed[i], host, port))
			continue;
		memcpy(key, dir->placed[i].key, sizeof(placed.key));
		return *key;
	}
	placed.stamp = dir_stamp(dir);
	for (unsigned int i = 0; !found && i < PLACES; i++) {
		place_check(dir, &dir->places[i]);
		dir->places[i].unread = false;
		found = place_walk(&dir->places[i], on_shown, &wanted);
		placed.stamp *= !dir->places[i].unread;
	}
	if (!found && !placed.stamp)
		return false;
	if (found)
		memcpy(placed.key, key, sizeof(placed.key));
	placed.until_ns += found ? PLACED_NS : NOWHERE_NS;
	dir->placed[dir->placed_next++ % PLACED_MAX] = placed;
	return found;
}

struct walk {
	struct curve_allow *seen; /* a daemon may be published in several directories */
	void (*each)(void *arg, const char *name, const char *key);
	void *arg;
};

static void on_each_line(void *arg, const char *name, const char *key)
{
	struct walk *walk = arg;
	char line[LINE_BYTES];

	if (curve_allow_name(walk->seen, key))
		return;
	snprintf(line, sizeof(line), "%s %s", name, key);
	if (curve_allow_add(walk->seen, line) < 0) {
		err_clear();
		return;
	}
	walk->each(walk->arg, name, key);
}

static bool on_each(void *arg, const struct curve_allow *allow)
{
	curve_allow_each(allow, on_each_line, arg);
	return false;
}

void link_keydir_each(struct link_keydir *dir,
		      void (*each)(void *arg, const char *name, const char *key),
		      void *arg)
{
	struct walk walk = {.seen = curve_allow_new(), .each = each, .arg = arg};

	for (unsigned int i = 0; dir && walk.seen && i < PLACES; i++)
		place_walk(&dir->places[i], on_each, &walk);
	curve_allow_free(walk.seen);
}

/* ---- life ---- */

int link_keydir_new(const struct config *config, struct curve_keys *keys_p,
		    struct link_keydir **dir_p)
{
	struct link_keydir *dir = mem_zalloc(sizeof(*dir));
	int r;

	if (!dir)
		return err_pass(-ENOMEM);
	lock_init(&dir->lock);
	for (unsigned int i = 0; i < PLACES; i++)
		dir->places[i].dir = dir->places[i].shown = -1;
	snprintf(dir->name, sizeof(dir->name), "%s", config->name);
	resolve_paths(dir, config);
	r = pair_take(dir, keys_p);
	if (r < 0) {
		link_keydir_free(dir);
		return err_pass(r);
	}
	*dir_p = dir;
	return 0;
}

void link_keydir_free(struct link_keydir *dir)
{
	if (!dir)
		return;
	for (unsigned int i = 0; i < PLACES; i++) {
		place_hide(dir, &dir->places[i]);
		if (dir->places[i].dir >= 0)
			close(dir->places[i].dir);
	}
	lock_drop(&dir->lock);
	mem_free(dir);
}

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The listening socket, and which users may connect. The mode of the socket excludes
 * users as far as the file system can; SO_PEERCRED and SO_PEERGROUPS decide about the
 * rest by the kernel's credentials. A connection is refused with one error line, so that
 * the user reads "not admitted" and not "connection reset".
 *
 * The name appears in the file system with its final rights: the mode of the socket's own
 * inode is set before bind() (the kernel takes it over), and connecting is impossible
 * before listen() (daemon/loop/lock.c). The name is checked once a second and recreated
 * if it was removed.
 *
 * When descriptors run out, accept() fails and the connection stays in the backlog, so a
 * level-triggered loop would spin: the listener pauses instead.
 *
 * A session costs the loop about 100 us for its start and end, a refusal a tenth of that.
 * So a user that opens sessions in quick succession is refused, and after a refusal the
 * listener slows down. That delays connect() for all, but no work of a session.
 */
#include "daemon/control/control.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/control/commands.h"
#include "daemon/request/commands.h"
#include "daemon/config/config.h"
#include "daemon/control/commands_peer.h"
#include "daemon/control/conn.h"
#include "daemon/gate/gate.h"
#include "daemon/loop/lock.h"
#include "daemon/session/session.h"
#include "daemon/base/share.h"

#define BACKLOG 128
#define ACCEPTS_A_TURN 16u
#define LOOK_NS LOOP_NS_PER_S /* at the socket's file */
#define PAUSE_NS (100 * LOOP_NS_PER_MS)
#define CLIENT_TIMEOUT_NS (30 * LOOP_NS_PER_S)
#define ADMIN_PART 16u
#define FEW_PART 32u	  /* 1/32 of the table is for users with few */
#define GROUPS_MAX 65536u /* the kernel's NGROUPS_MAX */
/* Sessions that a user may open at once, plus one in each SESSION_NS. */
#define BURST 256u
#define SESSION_NS (4 * LOOP_NS_PER_MS)
#define PACED_NS (2 * LOOP_NS_PER_MS) /* pause of the listener after such a refusal */
#define PACES 64u

/* Rate limit of the sessions of a user: paid until then. */
struct pace {
	uid_t uid;
	uint64_t until_ns;
};

struct control {
	struct kvd *kvd;
	struct pace paces[PACES];
	bool paced; /* a connection was refused for its rate */
	struct loop_fd listener;
	struct loop_timer pause;
	bool closed;
	struct lock_socket name;
	gid_t gid;	   /* of its file; -1: this process's */
	bool listed;	   /* in its access list instead */
	struct lock *lock; /* of the daemon's name; NULL: not guarded */
	struct loop_timer look;
	struct err lost; /* code != OK: why clients cannot connect */
	struct conn_host host;
};

/* ---- listening ---- */

static int group_id(const char *name, gid_t *gid_p)
{
	const struct group *group = getgrnam(name);
	unsigned long number;
	char *end;

	if (group) {
		*gid_p = group->gr_gid;
		return 0;
	}
	number = strtoul(name, &end, 10);
	if (name[0] < '0' || name[0] > '9' || *end || number >= UINT32_MAX)
		return err_raise(ERR_CONFIG, "socket_group '%s': no such group", name);
	*gid_p = (gid_t)number;
	return 0;
}

/* An entry of system.posix_acl_access (linux/posix_acl_xattr.h), little-endian. */
struct acl_entry {
	uint16_t tag, perm;
	uint32_t id;
};

/*
 * chown(2) requires membership of the group, and the unit's filter refuses it. An access
 * list does not: the owner can name any group. The entry of the file's own group is
 * empty, and chmod() sets the mask.
 */
static int path_admit(const char *path, gid_t gid, const char *group)
{
	enum { USER_OBJ = 1, GROUP_OBJ = 4, GROUP = 8, MASK = 16, OTHER = 32 };
	const struct {
		uint32_t version;
		struct acl_entry entries[5];
	} acl = {
		.version = htole32(2),
		.entries = {{htole16(USER_OBJ), htole16(6), UINT32_MAX},
			    {htole16(GROUP_OBJ), 0, UINT32_MAX},
			    {htole16(GROUP), htole16(7), htole32(gid)},
			    {htole16(MASK), htole16(6), UINT32_MAX},
			    {htole16(OTHER), 0, UINT32_MAX}},
	};

	if (setxattr(path, "system.posix_acl_access", &acl, sizeof(acl), 0) < 0)
		return err_raise_errno(errno,
				       "%s: granting access to group %s by an access "
				       "list, since chown is not permitted",
				       path, group);
	return 0;
}

static int path_failed(const char *path, const char *what)
{
	/* after start the sandbox forbids changes of owner and mode */
	if (errno == ENOSYS)
		return err_raise(ERR_IO,
				 "%s: recreated, but its %s could not be set; restart "
				 "this daemon",
				 path, what);
	return err_raise_errno(errno, "%s: %s", path, what);
}

/* Set group and mode of the socket's file, unless they are right already. */
static int path_own(struct control *control)
{
	const struct config *config = control->kvd->config;
	const char *path = control->name.path;
	struct stat st;
	bool give;

	if (lstat(path, &st) < 0)
		return path_failed(path, "file");
	give = control->gid != (gid_t)-1 && st.st_gid != control->gid && !control->listed;
	if (give && lchown(path, (uid_t)-1, control->gid) < 0) {
		if (errno != EPERM)
			return path_failed(path, "socket_group");
		if (path_admit(path, control->gid, config->socket_group) < 0)
			return err_pass(-EPERM);
		control->listed = true;
	}
	/* chown() may clear bits */
	if ((give || (st.st_mode & 07777) != config->socket_mode) &&
	    chmod(path, config->socket_mode) < 0)
		return path_failed(path, "socket_mode");
	return 0;
}

/* Until the group is right only this user can connect. */
static int socket_bind(struct control *control, int fd)
{
	const struct config *config = control->kvd->config;
	bool right = control->gid == (gid_t)-1 || control->gid == getegid();
	int r = lock_socket_bind(&control->name, fd, "socket_path", config->socket_path,
				 right ? config->socket_mode : 0600, BACKLOG);

	control->listed = false;
	return r < 0 ? err_pass(r) : err_pass(path_own(control));
}

static int control_option_of(int fd, int name)
{
	socklen_t len = sizeof(int);
	int v = -1;

	return getsockopt(fd, SOL_SOCKET, name, &v, &len) < 0 ? -1 : v;
}

/* Use a socket passed by a service manager. */
static int socket_inherit(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	if (control_option_of(fd, SO_DOMAIN) != AF_UNIX ||
	    control_option_of(fd, SO_TYPE) != SOCK_STREAM ||
	    control_option_of(fd, SO_ACCEPTCONN) != 1)
		return err_raise(ERR_CONFIG,
				 "fd %d: not a listening Unix stream socket "
				 "(ListenStream= of the socket unit)",
				 fd);
	if (fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
	    fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
		return err_raise_errno(errno, "flags of the inherited socket");
	return 0;
}

/* ---- coming in ---- */

static void control_refuse(struct control *control, int fd,
			   const struct session_peer *peer)
{
	char space[REPLY_SPACE];
	struct text text;
	struct err err;

	err_take(&err);
	text = reply_error(&err, space);
	metrics_add(&control->kvd->metrics, METRIC_SESSIONS_REFUSED, 1);
	log_warn("control", NULL, "connection refused", "pid=%d uid=%u why=\"%s\"",
		 (int)peer->pid, peer->uid, err.text);
	/* the buffer of a fresh socket takes a line; if not, the close must do */
	if (send(fd, text.data, text.len, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
		log_debug("control", NULL, "refusal not delivered", "errno=%d", errno);
	gate_turn_away(control->kvd->gates, fd);
}

/* All groups of the peer, as of its connect(). */
static int peer_groups(const struct session_peer *peer, gid_t **gids_p, size_t *count_p)
{
	socklen_t len = 0;
	gid_t *gids;

	/* query the size; a peer without groups needs none */
	if (getsockopt(peer->fd, SOL_SOCKET, SO_PEERGROUPS, NULL, &len) < 0 &&
	    errno != ERANGE)
		return err_raise_errno(errno, "SO_PEERGROUPS");
	if (len > GROUPS_MAX * sizeof(*gids))
		return err_raise(ERR_INTERNAL, "SO_PEERGROUPS: %u bytes of groups", len);
	gids = mem_calloc(len / sizeof(*gids) + 1, sizeof(*gids));
	if (!gids)
		return err_pass(-ENOMEM);
	if (len && getsockopt(peer->fd, SOL_SOCKET, SO_PEERGROUPS, gids, &len) < 0) {
		mem_free(gids);
		return err_raise_errno(errno, "SO_PEERGROUPS");
	}
	gids[len / sizeof(*gids)] = peer->gid;
	*count_p = len / sizeof(*gids) + 1;
	*gids_p = gids;
	return 0;
}

/*
 * A user with many sessions, in any number of processes, does not exclude others:
 * daemon/base/share.h, by uid. In a table of 16 and more, a sixteenth is reserved for
 * administrators: kvd-ctl can connect when all users together have filled the rest.
 * Administrators share by process, because they are mostly one user.
 */
static int check_cap(const struct kvd *kvd, const struct session_peer *peer)
{
	const bool admin = config_is_admin(kvd->config, peer->uid);
	const uint32_t max = kvd->config->sessions_max;
	const uint32_t most = admin ? max : max - max / ADMIN_PART;
	const struct session *session;
	unsigned int own = 0;

	if (kvd->session_count < most && kvd->session_count < share_cap(max, max))
		return 0;
	list_foreach(session, &kvd->sessions, link)
		own += admin ? session->pid == peer->pid : session->uid == peer->uid;
	if (kvd->session_count < most &&
	    (own < max / FEW_PART || share_allows(max, kvd->session_count, own)))
		return 0;
	return err_raise(ERR_LIMIT,
			 "%u sessions open, %u of them of %s %u (limit %u, option "
			 "sessions%s)",
			 kvd->session_count, own, admin ? "process" : "uid",
			 admin ? (unsigned int)peer->pid : peer->uid, max,
			 kvd->session_count >= max ? ""
			 : admin		   ? "; the last are reserved for "
						     "processes with few"
				 : "; the last are reserved for users with few and "
				   "administrators");
}

/* Beyond PACES users, the one that has opened the fewest sessions is forgotten. */
static int check_pace(struct control *control, uid_t uid)
{
	const uint64_t now_ns = loop_now_ns(control->kvd->loop);
	struct pace *pace = control->paces;

	for (unsigned int i = 0; i < PACES && pace->uid != uid; i++) {
		struct pace *other = &control->paces[i];

		if (other->uid == uid || other->until_ns < pace->until_ns)
			pace = other;
	}
	if (pace->uid != uid || pace->until_ns < now_ns)
		*pace = (struct pace){uid, now_ns};
	control->paced |= pace->until_ns > now_ns + BURST * SESSION_NS;
	if (pace->until_ns > now_ns + BURST * SESSION_NS)
		return err_raise(ERR_LIMIT,
				 "uid %u opens sessions too fast (limit: a burst of %u, "
				 "then %ju a second); open one session per process and "
				 "keep it",
				 uid, BURST, (uintmax_t)(LOOP_NS_PER_S / SESSION_NS));
	pace->until_ns += SESSION_NS;
	return 0;
}

/* ERR_PERM. */
static int check_user(const struct config *config, const struct session_peer *peer)
{
	cleanup_free gid_t *gids = NULL;
	size_t count = 0;
	int r = peer_groups(peer, &gids, &count);

	if (r < 0)
		return err_pass(r);
	if (config_admits(config, peer->uid, gids, count))
		return 0;
	return err_raise(ERR_PERM,
			 "uid %u is not admitted; see allow_uids and allow_gids",
			 peer->uid);
}

static int control_admit(struct control *control, const struct session_peer *peer)
{
	const struct config *config = control->kvd->config;
	int r = check_user(config, peer);

	if (r < 0)
		return err_pass(r);
	r = config_is_admin(config, peer->uid) ? 0 : check_pace(control, peer->uid);
	if (r == 0)
		r = check_cap(control->kvd, peer);
	if (r < 0)
		return err_pass(r);
	return err_pass(conn_new(&control->host, peer->fd, peer));
}

static void control_welcome(struct control *control, int fd)
{
	struct session_peer peer = {.fd = fd, .uid = (uid_t)-1, .gid = (gid_t)-1};
	struct ucred cred;
	socklen_t len = sizeof(cred);
	int r;

	r = gate_prepare(fd);
	if (r == 0 && getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0)
		r = err_raise_errno(errno, "SO_PEERCRED");
	if (r == 0) {
		peer.pid = cred.pid;
		peer.uid = cred.uid;
		peer.gid = cred.gid;
		r = control_admit(control, &peer);
	}
	if (r < 0)
		control_refuse(control, fd, &peer);
}

static void listener_rest(struct control *control, uint64_t ns)
{
	loop_timer_start(&control->pause, ns);
	loop_fd_stop(&control->listener);
}

static void control_rest(struct control *control, const char *why)
{
	log_warn("control", NULL, "accept failed", "why=\"%s\" pause_ms=%ju", why,
		 (uintmax_t)(PAUSE_NS / LOOP_NS_PER_MS));
	listener_rest(control, PAUSE_NS);
}

static void on_listener(struct loop_fd *watch, int events)
{
	struct control *control = container_of(watch, struct control, listener);

	(void)events;
	control->paced = false;
	for (unsigned int i = 0; i < ACCEPTS_A_TURN; i++) {
		int fd;

		if (gates_full(control->kvd->gates)) {
			control_rest(control, "too many closed connections wait for "
					      "their release");
			return;
		}
		fd = accept4(watch->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (fd >= 0) {
			control_welcome(control, fd);
			continue;
		}
		if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED)
			break;
		control_rest(control, strerror(errno));
		return;
	}
	if (control->paced)
		listener_rest(control, PACED_NS);
}

static void on_pause_over(struct loop_timer *timer)
{
	struct control *control = container_of(timer, struct control, pause);

	if (control->closed)
		return;
	if (loop_fd_set(&control->listener, LOOP_READ) < 0)
		loop_timer_start(timer, PAUSE_NS);
}

/* ---- life ---- */

static int listener_open(struct control *control)
{
	cleanup_close int fd =
		socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	int r = fd < 0 ? err_raise_errno(errno, "creating a Unix socket")
		       : socket_bind(control, fd);

	if (r == 0)
		control->listener.fd = mem_steal_fd(&fd);
	return err_pass(r);
}

static int listener_start(struct control *control)
{
	int r = loop_fd_set(&control->listener, LOOP_READ);

	if (r == 0)
		gate_listen(control->listener.fd);
	return err_pass(r);
}

static int control_init(struct control *control, int listen_fd)
{
	const char *group = control->kvd->config->socket_group;
	int r;

	if (listen_fd >= 0) {
		control->listener.fd = listen_fd;
		r = socket_inherit(listen_fd);
	} else {
		r = *group ? group_id(group, &control->gid) : 0;
		if (r == 0)
			r = listener_open(control);
	}
	if (r == 0)
		r = listener_start(control);
	return err_pass(r);
}

/* ---- the files in run_dir ---- */

/* A cleaner of temporary files, or a person, has removed the file of the socket:
 * clients could not connect, and would take the daemon for dead. */
static int listener_again(struct control *control)
{
	int r;

	loop_timer_stop(&control->pause);
	loop_fd_stop(&control->listener);
	mem_closep(&control->listener.fd);
	r = listener_open(control);
	if (r == 0)
		r = listener_start(control);
	return err_pass(r);
}

static int files_look(struct control *control)
{
	int r = control->lock ? lock_look(control->lock) : 0;

	if (r == LOCK_MADE_AGAIN)
		log_warn("control", control->lock->path, "file was removed; recreated",
			 "pid=%d", (int)getpid());
	if (r >= 0)
		r = lock_socket_look(&control->name);
	if (r == 0 && control->listener.fd >= 0)
		return control->name.path[0] ? err_pass(path_own(control)) : 0;
	if (r < 0)
		return err_pass(r);
	r = listener_again(control);
	if (r == 0)
		log_warn("control", control->kvd->config->socket_path,
			 "file was removed; recreated", "pid=%d", (int)getpid());
	return err_pass(r);
}

static void control_on_look(struct loop_timer *timer)
{
	struct control *control = container_of(timer, struct control, look);
	struct err lost = {.code = ERR_OK};

	if (files_look(control) < 0)
		err_take(&lost);
	if (lost.code != ERR_OK && lost.code != control->lost.code)
		log_error("control", control->kvd->config->socket_path,
			  "clients cannot connect", "why=\"%s\"", lost.text);
	control->lost = lost;
	loop_timer_start_tick(timer, LOOK_NS);
}

bool control_is_lost(const struct control *control, struct err *why_p)
{
	if (control->lost.code != ERR_OK)
		*why_p = control->lost;
	return control->lost.code != ERR_OK;
}

int control_new(struct kvd *kvd, int listen_fd, struct control **control_p)
{
	struct control *control = mem_zalloc(sizeof(*control));
	int r;

	if (!control)
		return err_pass(-ENOMEM);
	control->kvd = kvd;
	control->host.kvd = kvd;
	control->host.timeout_ns = CLIENT_TIMEOUT_NS;
	list_init(&control->host.conns);
	loop_fd_init(&control->listener, kvd->loop, -1, on_listener);
	loop_timer_init(&control->pause, kvd->loop, on_pause_over);
	loop_timer_init(&control->look, kvd->loop, control_on_look);
	control->gid = (gid_t)-1;
	r = control_init(control, listen_fd);
	if (r < 0) {
		control_close(control);
		control_free(control);
		return err_pass(r);
	}
	*control_p = control;
	return 0;
}

void control_close(struct control *control)
{
	struct session *session;

	if (control->closed)
		return;
	control->closed = true;
	loop_timer_stop(&control->pause);
	loop_timer_stop(&control->look);
	loop_fd_stop(&control->listener);
	lock_socket_drop(&control->name);
	mem_closep(&control->listener.fd);
	list_foreach_safe(session, &control->kvd->sessions, link)
		session_end(session, "the daemon is shutting down");
}

bool control_idle(const struct control *control)
{
	return list_empty(&control->host.conns) && list_empty(&control->kvd->sessions);
}

void control_free(struct control *control)
{
	if (!control)
		return;
	control_close(control);
	conns_free(&control->host);
	mem_free(control);
}

unsigned int control_recheck(struct control *control)
{
	const struct config *config = control->kvd->config;
	struct session *session;
	unsigned int ended = 0;
	struct err why;

	list_foreach(session, &control->kvd->sessions, link) {
		struct session_peer peer = {.uid = session->uid, .gid = session->gid};

		if (!session->conn)
			continue;
		peer.fd = conn_fd(session->conn);
		session->admin = config_is_admin(config, session->uid);
		if (check_user(config, &peer) == 0)
			continue;
		err_take(&why);
		conn_end_later(session->conn, &why);
		ended++;
	}
	return ended;
}

void control_set_timeout(struct control *control, uint64_t ns)
{
	control->host.timeout_ns = ns;
}

/* ---- the module ---- */

static int control_part_new(struct kvd *kvd, void **part_p)
{
	const struct kvd_sockets *sockets = kvd->sockets;
	struct control *control = NULL;
	int r = control_new(kvd, sockets ? sockets->control_fd : -1, &control);

	*part_p = control;
	if (r >= 0 && sockets) { /* the lock outlives control_close() */
		control->lock = sockets->lock;
		loop_timer_start(&control->look, LOOK_NS);
	}
	return err_pass(r);
}

static void control_part_close(void *part, const struct err *why)
{
	peer_commands_stop(why);
	control_close(part);
}

static bool control_part_drained(const void *part, struct err *why_p)
{
	(void)why_p;
	return control_idle(part);
}

static void control_part_free(void *part)
{
	control_free(part);
}

static const struct command *const control_tables[] = {
	session_commands, region_commands, pool_commands, peer_commands, device_commands,
	stats_commands,	  admin_commands,  keys_commands, NULL};

const struct module control_module = {
	.id = MODULE_CONTROL,
	.name = "control",
	.commands = control_tables,
	.new = control_part_new,
	.close = control_part_close,
	.drained = control_part_drained,
	.free = control_part_free,
	.remote_change = peer_commands_on_change,
};

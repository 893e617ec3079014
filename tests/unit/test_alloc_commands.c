/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every command of the table while its 1st, 2nd, ... allocation fails, and while
 * all fail from there on. Each is either done and answered so, or refused with a
 * word of what was wanting and nothing of it done: lists, figures and the count of
 * heap blocks are what they were, and the same command works afterwards. A command
 * without a trial here fails the test.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/modules.h"
#include "daemon/request/commands.h"
#include "daemon/session/status.h"
#include "proto/base64.h"
#include "proto/kvd_ring.h"
#include "tests/lib/cluster_store.h"
#include "tests/lib/disk_sim.h"
#include "tests/lib/file.h"
#include "tests/lib/starve.h"
#include "tests/lib/sweep.h"
#include "tests/lib/tmp.h"

#define LINES_MAX 8
#define DISK_BYTES (UINT64_C(256) << 20)
#define SETTLE_NS (300 * LOOP_NS_PER_MS)
#define LOADS_NS (2 * LOOP_NS_PER_S) /* in which a new place has its load */

#define OPEN_SEND "a{'cmd':'room.open','room':'7','role':'send','pool':$pool_a}"
#define OPEN_RECV                                                      \
	"b{'cmd':'room.open','room':'7','role':'recv','pool':$pool_b," \
	"'sources':['$ep_a']}"
#define VIEWS "'views':{'kv':{'pages':[1,2,5],'tokens':[0,12]}},'aux':1"
#define BIND "b{'cmd':'room.bind','room':'7'," VIEWS "}"
#define SEND "a{'cmd':'room.send','room':'7','seq':0,'last':true," VIEWS "}"
#define OPEN_OFFER                                                                 \
	"a{'cmd':'room.open','room':'7','role':'offer','pool':$pool_a,'lease_ms':" \
	"300000," VIEWS "}"
#define OPEN_PULL                                                                    \
	"b{'cmd':'room.open','room':'7','role':'pull','pool':$pool_b,"               \
	"'sources':['$ep_a']," VIEWS ",'remote':[{" VIEWS "}],'wait':{'kind':'seq'," \
	"'region':$region_b,'offset':0,'value':'9'}}"
#define END_A "?a{'cmd':'room.abort','room':'7'}"
#define END_B "?b{'cmd':'room.abort','room':'7'}"
#define CLOSE_A "?a{'cmd':'room.close','room':'7'}"
#define CLOSE_B "?b{'cmd':'room.close','room':'7'}"
#define END_BOTH END_A, END_B, "~300", CLOSE_A, CLOSE_B
#define ATTACH                                                           \
	"a{'cmd':'peer.attach','endpoint':'$ep_b','session':'$epoch_b'," \
	"'secret':'$secret_b'}"
#define PREP_LOCAL "a{'cmd':'dlist.prep','descs':[['$base_a',256],['$base_a',64,128,4]]}"
#define PREP_REMOTE                                                    \
	"a{'cmd':'dlist.prep','peer':$there,'descs':[['$base_b',256]," \
	"['$base_b',64,128,4]]}"
#define SUBMIT(entry, data) \
	"a{'cmd':'xfer.submit','entry':'$" entry "','data':'" data "'}"
#define HELLO "aGVsbG8="
#define WRITE SUBMIT("write", "$picks")
#define READ SUBMIT("read", HELLO)
#define NOTIFY SUBMIT("notify", HELLO)
#define RELEASE SUBMIT("release", "")
#define READ_NOTIFS "b{'cmd':'notif.drain'}"
#define SIDE                                                                        \
	"{'rank':0,'buffers':[65536],'views':{'kv':{'page_tokens':16,'pages':16,"   \
	"'layers':[{'layer':0,'fields':[{'name':'k','buffer':0,'offset':0,"         \
	"'page_stride':4096,'token_stride':256,'unit_stride':256,'unit_bytes':256," \
	"'first_unit':0,'units':1,'total_units':1}]}]}}}"
#define POOL                                                                          \
	"a{'cmd':'pool.register','name':'more','regions':[{'region':$region_a}],"     \
	"'layout':{'rank':0,'buffers':[4096],'views':{'kv':{'page_tokens':1,"         \
	"'pages':1,'layers':[{'layer':0,'fields':[{'name':'k','buffer':0,'offset':0," \
	"'page_stride':4096,'token_stride':4096,'unit_stride':4096,"                  \
	"'unit_bytes':4096,'first_unit':0,'units':1,'total_units':1}]}]}}}}"
#define REGION                                                                    \
	"a{'cmd':'region.register','kind':'shm','shm_name':'$shm','length':8192," \
	"'address':'8192','name':'more'}"
#define PUBLISH                                                                         \
	"a{'cmd':'group.publish','group':'g','summary':'text','tp_rank':1,'tp_size':2," \
	"'pool':'kv'}"

#define H8(digit) digit digit digit digit digit digit digit digit
#define ID(digit) "'" H8(H8(digit)) "'"
#define IDS "'space':$space,'ids':[" ID("1") "," ID("2") "]"
#define WORDS "'model':'m','scheme':'s','tokens':16"
#define SPACE "a{'cmd':'space.open','pool':$pool_a," WORDS "}"
#define SPACE_CLOSE "a{'cmd':'space.close','space':$space}"
#define CHUNK_PAGES "'pool':$pool_a,'views':{'kv':{'pages':[7,2,3,4,0,9,6,8]}}"
#define UNTIL_9 ",'wait':{'kind':'seq','region':$region_a,'offset':0,'value':'9'}"
#define PUT "a{'cmd':'chunk.put'," IDS "," CHUNK_PAGES "}"
#define PUT_LATER "a{'cmd':'chunk.put'," IDS "," CHUNK_PAGES UNTIL_9 "}"
#define CHUNK_PUBLISH "a{'cmd':'chunk.publish'," IDS "," CHUNK_PAGES "}"
#define WITHDRAW "a{'cmd':'chunk.withdraw'," IDS "}"
#define MOVE_CLOSE "a{'cmd':'chunk.close','move':$move}"
#define STORED SPACE, PUT, "~50", MOVE_CLOSE
#define HOLD "a{'cmd':'chunk.hold'," IDS "}"
#define HOLD_CLOSE "a{'cmd':'chunk.release','hold':$hold}"
#define FETCH "a{'cmd':'chunk.fetch','hold':$hold," CHUNK_PAGES "}"
#define DROP "a{'cmd':'chunk.drop'," IDS "}"

struct trial {
	const char *command; /* of the table */
	const char *line;
	const char *before[LINES_MAX]; /* until the line is done */
	const char *after[LINES_MAX];  /* when it was: as it was before */
	unsigned int settle_s; /* until nothing of a failed one is left, if long */
	bool fd;
	bool grows;	/* each time there is one more, nothing takes it back */
	bool far;	/* a peer has a part in it: without any memory it would be lost */
	bool files;	/* the store needs them */
	bool elsewhere; /* by a test of its own */
};

static const struct trial trials[] = {
	{.command = "ping", .line = "a{'cmd':'ping'}"},
	{.command = "hello", .line = "a{'cmd':'hello','proto':1,'client':'engine a'}"},
	{.command = "help", .line = "a{'cmd':'help'}"},
	{.command = "help", .line = "a{'cmd':'help','command':'room.open'}"},
	{.command = "session.list", .line = "a{'cmd':'session.list','all':true}"},
	{.command = "session.report",
	 .line = "a{'cmd':'session.report','running':3,'kv_free_tokens':4096}"},
	{.command = "region.register",
	 .line = "a{'cmd':'region.register','kind':'memfd','fd':0,'length':8192,'address'"
		 ":'4096'}",
	 .after = {"a{'cmd':'region.unregister','region':$region}"},
	 .fd = true},
	{.command = "region.register",
	 .line = REGION,
	 .after = {"a{'cmd':'region.unregister','region':$region}"}},
	{.far = true,
	 .command = "region.unregister",
	 .line = "a{'cmd':'region.unregister','region':$region}",
	 .before = {REGION}},
	{.command = "region.list", .line = "a{'cmd':'region.list','all':true}"},
	{.far = true,
	 .command = "pool.register",
	 .line = POOL,
	 .after = {"a{'cmd':'pool.unregister','pool':$pool}"}},
	{.far = true,
	 .command = "pool.unregister",
	 .line = "a{'cmd':'pool.unregister','pool':$pool}",
	 .before = {POOL}},
	{.command = "secret.create",
	 .line = "a{'cmd':'secret.create','regions':[$region_a],'peer':'x'}",
	 .after = {"a{'cmd':'secret.revoke','grant':$grant}"}},
	{.command = "secret.extend",
	 .line = "a{'cmd':'secret.extend','grant':$grant}",
	 .before = {"a{'cmd':'secret.create','regions':[$region_a]}"},
	 .after = {"a{'cmd':'secret.revoke','grant':$grant}"}},
	{.command = "secret.revoke",
	 .line = "a{'cmd':'secret.revoke','grant':$grant}",
	 .before = {"a{'cmd':'secret.create'}"}},
	{.command = "pool.list", .line = "a{'cmd':'pool.list','all':true}"},
	{.far = true,
	 .command = "room.open",
	 .line = OPEN_SEND,
	 .after = {END_A, "~50", CLOSE_A}},
	{.far = true, .command = "room.open", .line = OPEN_RECV, .after = {END_BOTH}},
	{.far = true,
	 .command = "room.open",
	 .line = OPEN_SEND,
	 .before = {OPEN_RECV, BIND, "~50"},
	 .after = {END_BOTH}},
	{.far = true,
	 .command = "room.open",
	 .line = OPEN_OFFER,
	 .after = {END_A, "~50", CLOSE_A}},
	{.far = true,
	 .command = "room.open",
	 .line = OPEN_PULL,
	 .before = {OPEN_OFFER},
	 .after = {END_BOTH}},
	{.far = true,
	 .command = "room.extend",
	 .line = "a{'cmd':'room.extend','room':'7','lease_ms':400000}",
	 .before = {OPEN_OFFER},
	 .after = {END_A, "~50", CLOSE_A}},
	{.far = true,
	 .command = "room.bind",
	 .line = BIND,
	 .before = {OPEN_SEND, OPEN_RECV, "~50"},
	 .after = {END_BOTH}},
	{.far = true,
	 .command = "room.send",
	 .line = SEND,
	 .before = {OPEN_SEND},
	 .after = {END_A, "~50", CLOSE_A}},
	{.far = true,
	 .command = "room.send",
	 .line = SEND,
	 .before = {OPEN_SEND, OPEN_RECV, BIND, "~50"},
	 .after = {END_BOTH}},
	{.command = "room.poll",
	 .line = "a{'cmd':'room.poll','rooms':['7',{'room':'7','role':'send'},'8']}",
	 .before = {OPEN_SEND},
	 .after = {END_A, "~50", CLOSE_A}},
	{.command = "room.poll",
	 .line = "a{'cmd':'room.poll','since':'0'}",
	 .before = {OPEN_SEND},
	 .after = {END_A, "~50", CLOSE_A}},
	{.far = true,
	 .command = "room.abort",
	 .line = "a{'cmd':'room.abort','room':'7','reason':'test'}",
	 .before = {OPEN_SEND, OPEN_RECV, BIND, "~50"},
	 .after = {END_BOTH}},
	{.far = true,
	 .command = "room.abort",
	 .line = "b{'cmd':'room.abort','room':'7','reason':'test'}",
	 .before = {OPEN_SEND, OPEN_RECV, BIND, "~50"},
	 .after = {END_BOTH}},
	{.far = true,
	 .command = "room.close",
	 .line = "a{'cmd':'room.close','room':'7'}",
	 .before = {OPEN_SEND, END_A, "~50"}},
	{.command = "room.show",
	 .line = "b{'cmd':'room.show','room':'7'}",
	 .before = {OPEN_SEND, OPEN_RECV, BIND, "~50", END_A, "~50"},
	 .after = {END_BOTH}},
	{.command = "room.list",
	 .line = "a{'cmd':'room.list','all':true}",
	 .before = {OPEN_SEND, OPEN_RECV, BIND, "~50"},
	 .after = {END_BOTH}},
	{.command = "room.list",
	 .line = "a{'cmd':'room.list','all':true,'state':'unopened'}",
	 .before = {OPEN_RECV, BIND, "~50"},
	 .after = {END_BOTH}},
	{.command = "room.history",
	 .line = "a{'cmd':'room.history','all':true}",
	 .before = {OPEN_SEND, END_A, "~50", CLOSE_A}},
	{.command = "room.trace",
	 .line = "a{'cmd':'room.trace','room':'7','all':true,'pages':true}",
	 .before = {OPEN_SEND, OPEN_RECV, BIND, "~50", END_A, "~50", CLOSE_A},
	 .after = {END_BOTH}},
	{.command = "pool.layout", .line = "a{'cmd':'pool.layout','pool':$pool_a}"},
	{.far = true, .command = "peer.attach", .grows = true, .line = ATTACH},
	{.far = true,
	 .command = "peer.connect",
	 .line = "a{'cmd':'peer.connect','endpoint':'$ep_b'}"},
	{.far = true,
	 .command = "peer.connect",
	 .line = "a{'cmd':'peer.connect','endpoint':'$ep_c'}",
	 .settle_s = 30,
	 .after = {"c", "~5000"}},
	{.command = "peer.list", .line = "a{'cmd':'peer.list'}"},
	{.command = "keys", .line = "a{'cmd':'keys'}"},
	{.far = true, .command = "group.publish", .line = PUBLISH},
	{.far = true,
	 .command = "group.query",
	 .line = "a{'cmd':'group.query','group':'g'}",
	 .before = {PUBLISH}},
	{.command = "cluster.show",
	 .line = "a{'cmd':'cluster.show'}",
	 .before = {PUBLISH}},
	{.far = true,
	 .command = "peer.attached",
	 .line = "a{'cmd':'peer.attached','attach':$there}"},
	{.far = true,
	 .command = "peer.attached",
	 .line = "a{'cmd':'peer.attached','attach':$there,'fresh':true}"},
	{.command = "dlist.prep",
	 .line = PREP_LOCAL,
	 .after = {"a{'cmd':'dlist.free','dlist':$dlist}"}},
	{.command = "dlist.prep",
	 .line = "a{'cmd':'dlist.prep','fd':0,'count':1}",
	 .fd = true,
	 .after = {"a{'cmd':'dlist.free','dlist':$dlist}"}},
	{.command = "dlist.prep",
	 .line = PREP_REMOTE,
	 .after = {"a{'cmd':'dlist.free','dlist':$dlist}"}},
	{.far = true,
	 .command = "dlist.free",
	 .line = "a{'cmd':'dlist.free','dlist':$dlist}",
	 .before = {PREP_REMOTE}},
	{.far = true,
	 .command = "xfer.submit",
	 .line = WRITE,
	 .after = {"~100", RELEASE, READ_NOTIFS}},
	{.far = true,
	 .command = "xfer.submit",
	 .line = READ,
	 .after = {"~100", RELEASE, READ_NOTIFS}},
	{.far = true,
	 .command = "xfer.submit",
	 .line = SUBMIT("again", HELLO),
	 .before = {WRITE, "~100", READ_NOTIFS},
	 .after = {"~100", RELEASE, READ_NOTIFS}},
	{.far = true,
	 .command = "xfer.submit",
	 .line = SUBMIT("cancel", ""),
	 .before = {READ},
	 .after = {"~100", RELEASE, READ_NOTIFS}},
	{.far = true,
	 .command = "xfer.submit",
	 .line = RELEASE,
	 .before = {WRITE},
	 .after = {"~100", READ_NOTIFS}},
	{.far = true,
	 .command = "xfer.submit",
	 .line = RELEASE,
	 .before = {WRITE, "~100", READ_NOTIFS}},
	{.far = true,
	 .command = "xfer.submit",
	 .line = NOTIFY,
	 .after = {"~50", READ_NOTIFS}},
	{.far = true,
	 .command = "xfer.state",
	 .line = "a{'cmd':'xfer.state','xfer':$xfer}",
	 .before = {WRITE, "~100", READ_NOTIFS},
	 .after = {RELEASE}},
	{.far = true,
	 .command = "notif.drain",
	 .line = READ_NOTIFS,
	 .before = {NOTIFY, "~50"}},
	{.command = "xfer.submit", .line = SUBMIT("cancel", "")},
	{.command = "space.open", .line = SPACE, .after = {SPACE_CLOSE}},
	{.command = "space.open",
	 .line = "a{'cmd':'space.open','layout':" SIDE ",'views':['kv']," WORDS
		 ",'revision':'r','rope':'p'}",
	 .after = {SPACE_CLOSE}},
	{.command = "space.close", .line = SPACE_CLOSE, .before = {SPACE}},
	{.command = "chunk.holders",
	 .line = "a{'cmd':'chunk.holders','hold':$hold}",
	 .before = {STORED, HOLD},
	 .after = {HOLD_CLOSE, DROP, SPACE_CLOSE}},
	{.command = "chunk.put",
	 .line = PUT,
	 .before = {SPACE},
	 .after = {"~50", MOVE_CLOSE, DROP, SPACE_CLOSE}},
	{.command = "chunk.put",
	 .line = PUT_LATER,
	 .before = {SPACE},
	 .after = {MOVE_CLOSE, DROP, SPACE_CLOSE}},
	{.files = true,
	 .command = "chunk.put",
	 .line = "a{'cmd':'chunk.put','durable':true," IDS "," CHUNK_PAGES "}",
	 .before = {SPACE},
	 .after = {"~500", MOVE_CLOSE, DROP, SPACE_CLOSE}},
	{.command = "chunk.publish",
	 .line = CHUNK_PUBLISH,
	 .before = {SPACE},
	 .after = {"~50", MOVE_CLOSE, DROP, SPACE_CLOSE}},
	{.command = "chunk.withdraw",
	 .line = WITHDRAW,
	 .before = {SPACE, CHUNK_PUBLISH, "~50", MOVE_CLOSE},
	 .after = {"~50", MOVE_CLOSE, DROP, SPACE_CLOSE}},
	{.command = "chunk.fetch",
	 .line = FETCH,
	 .before = {STORED, HOLD},
	 .after = {"~50", MOVE_CLOSE, HOLD_CLOSE, DROP, SPACE_CLOSE}},
	{.command = "chunk.move",
	 .line = "a{'cmd':'chunk.move','move':$move}",
	 .before = {SPACE, PUT, "~50"},
	 .after = {MOVE_CLOSE, DROP, SPACE_CLOSE}},
	{.command = "chunk.abort",
	 .line = "a{'cmd':'chunk.abort','move':$move}",
	 .before = {SPACE, PUT_LATER},
	 .after = {MOVE_CLOSE, SPACE_CLOSE}},
	{.command = "chunk.close",
	 .line = MOVE_CLOSE,
	 .before = {SPACE, PUT_LATER},
	 .after = {SPACE_CLOSE}},
	{.command = "chunk.close",
	 .line = MOVE_CLOSE,
	 .before = {SPACE, PUT, "~50"},
	 .after = {DROP, SPACE_CLOSE}},
	{.command = "chunk.drop",
	 .line = DROP,
	 .before = {STORED},
	 .after = {SPACE_CLOSE}},
	{.command = "chunk.events",
	 .line = "a{'cmd':'chunk.events','space':$space}",
	 .before = {SPACE},
	 .after = {SPACE_CLOSE}},
	{.command = "chunk.events",
	 .line = "a{'cmd':'chunk.events','since':$seq,'instance':'$instance'}",
	 .before = {SPACE, "a{'cmd':'chunk.events'}", PUT, "~300", MOVE_CLOSE},
	 .after = {DROP, SPACE_CLOSE}},
	{.command = "chunk.snapshot",
	 .line = "a{'cmd':'chunk.snapshot'}",
	 .before = {SPACE, PUT, "~300", MOVE_CLOSE},
	 .after = {DROP, SPACE_CLOSE}},
	{.command = "chunk.list",
	 .line = "a{'cmd':'chunk.list','all':true}",
	 .before = {STORED},
	 .after = {DROP, SPACE_CLOSE}},
	{.command = "stats", .line = "a{'cmd':'stats'}"},
	{.command = "health", .line = "a{'cmd':'health'}"},
	{.command = "devices", .line = "a{'cmd':'devices'}"},
	{.command = "config.show", .line = "a{'cmd':'config.show'}"},
	{.command = "log.level",
	 .line = "a{'cmd':'log.level','level':'warn'}",
	 .after = {"a{'cmd':'log.level','level':'error'}"}},
	{.command = "cost.show", .line = "a{'cmd':'cost.show'}"},
	{.command = "cost.page", .line = "a{'cmd':'cost.page'}"},
	{.command = "attention.open",
	 .line = NULL,
	 .elsewhere = true}, /* test_alloc_attend */
	{.command = "attention.close", .line = NULL, .elsewhere = true},
	{.command = "cost.calibrate", .line = NULL, .elsewhere = true}, /* the same */
	{.command = "session.share", .line = NULL, .elsewhere = true},	/* it needs fds */
	{.command = "config.reload", .line = NULL, .elsewhere = true},
	{.command = "drain", .line = NULL, .elsewhere = true},
};

static void every_command_has_a_trial(void **state)
{
	const struct command *cmd;

	(void)state;
	for (unsigned int i = 0; (cmd = commands_at(modules_built, i)); i++) {
		bool found = false;

		for (size_t t = 0; t < ARRAY_LEN(trials); t++)
			found |= strcmp(trials[t].command, cmd->name) == 0;
		if (!found)
			fail_msg("%s has no trial here", cmd->name);
	}
	for (size_t t = 0; t < ARRAY_LEN(trials); t++) {
		assert_non_null(commands_find(modules_built, trials[t].command, NULL));
		if (!trials[t].elsewhere)
			assert_non_null(strstr(trials[t].line, trials[t].command));
	}
}

/* ---- the sweep ---- */

struct sweep {
	struct starve s;
	bool lasting, lost, files;
	struct disk_sim *disk; /* files: the store's */
	int shm;
	char shm_name[64];
};

static uint64_t known(const struct starve *s, const char *name)
{
	for (unsigned int i = 0; i < s->word_count; i++) {
		if (strcmp(s->words[i].name, name) == 0)
			return strtoull(s->words[i].value, NULL, 10);
	}
	return 0;
}

/* Entries of the submission ring, all about one transfer, in the generation that comes
 * next. */
static void know_entries(struct starve *s)
{
	uint32_t slot = SESSION_SLOTS,
		 gen = kvd_ring_next_gen(status_slot_gen(s->a->status, slot));
	uint64_t id = KVD_RING_IDS + slot, mine = known(s, "mine"),
		 yours = known(s, "yours");
	const uint32_t posts = KVD_RING_POSTS | KVD_RING_NOTIFIES;
	const struct {
		const char *name;
		struct kvd_ring_entry entry;
	} entries[] = {
		{"write",
		 {KVD_RING_XFER, posts | KVD_RING_WRITES, slot, gen, .a = mine,
		  .b = yours, .n0 = 2, .n1 = 2, .bytes = 5}},
		{"read",
		 {KVD_RING_XFER, posts, slot, gen, .a = mine, .b = yours, .bytes = 5}},
		{"again",
		 {KVD_RING_POST, KVD_RING_NOTIFIES, .gen = gen, .a = id, .bytes = 5}},
		{"cancel", {KVD_RING_CANCEL, .a = id}},
		{"release", {KVD_RING_RELEASE, .a = id}},
		{"notify", {KVD_RING_NOTIFY, .a = known(s, "there"), .bytes = 5}},
	};
	static const uint32_t picks[] = {1, 3, 1, 3};
	char text[BASE64_CHARS(sizeof(entries[0].entry)) + 1];
	uint8_t data[sizeof(picks) + 5];

	for (size_t i = 0; i < ARRAY_LEN(entries); i++) {
		base64_encode(&entries[i].entry, sizeof(entries[i].entry), text);
		starve_word(s, entries[i].name, "%s", text);
	}
	memcpy(data, picks, sizeof(picks));
	memcpy(data + sizeof(picks), "hello", 5);
	base64_encode(data, sizeof(data), text);
	starve_word(s, "picks", "%s", text);
	starve_word(s, "xfer", "%ju", (uintmax_t)id);
}

/* "c": the third daemon's peering with the first ends. */
static void forget_c(struct sweep *w)
{
	struct remote *remote;
	struct err why;

	err_set(&why, ERR_PEER, "the test ends it");
	list_foreach_safe(remote, handshake_remotes(w->s.c.nodes[0].kvd.handshake),
			  link) {
		if (strcmp(remote->peer->endpoint, w->s.c.nodes[2].endpoint) == 0 &&
		    sm_state(&remote->peer->sm) == PEER_UP)
			peer_kill(remote->peer, &why);
	}
}

static void say_all(struct sweep *w, const char *const *lines)
{
	for (size_t i = 0; i < LINES_MAX && lines[i]; i++) {
		know_entries(&w->s);
		if (strcmp(lines[i], "c") == 0)
			forget_c(w);
		else
			starve_say(&w->s, lines[i]);
	}
	cluster_run(&w->s.c, SETTLE_NS);
}

static void nothing_changed(struct sweep *w, const char *before, bool counters,
			    const char *what)
{
	char *now;

	cluster_run(&w->s.c, SETTLE_NS);
	now = starve_look(&w->s, counters);
	starve_same(before, now, what);
	free(now);
}

/* What was done may have left out what only saves work, a tombstone. */
static void nothing_leaked(struct sweep *w, int64_t live, bool done, const char *what)
{
	live = starve_blocks(&w->s) - live;
	if (live > 0 || (live < 0 && !done))
		fail_msg("%s: %jd heap blocks more", what, (intmax_t)live);
}

/* Of a's and b's daemons, as they see each other; 0: not up. */
static uint64_t peering(const struct sweep *w)
{
	uint64_t sum = 0;

	for (unsigned int i = 0; i < 2; i++) {
		const struct node *there = &w->s.c.nodes[1 - i];
		const struct remote *remote;

		list_foreach(remote, handshake_remotes(w->s.c.nodes[i].kvd.handshake),
			     link)
			if (strcmp(remote->peer->endpoint, there->endpoint) == 0)
				sum += sm_state(&remote->peer->sm) == PEER_UP
					       ? remote->peer->epoch
					       : 0;
	}
	return sum;
}

/* Once; true when there was an allocation to fail. *done_p: the command is. What was
 * lost may have been the peering's end (w->lost): then all is another state. */
static bool attempt(struct sweep *w, const struct trial *t, uint64_t nth, bool first,
		    bool *done_p)
{
	uint64_t before_it = peering(w);
	struct cluster_lack lack = {.nth = nth, .lasting = w->lasting};
	char *before = starve_look(&w->s, true), what[160];
	int64_t live = starve_blocks(&w->s);
	cJSON *answer;

	know_entries(&w->s);
	answer = starve_try(&w->s, t->line, t->fd, &lack);
	*done_p = strcmp(starve_code(answer), "ok") == 0;
	snprintf(what, sizeof(what), "%s without allocation %s%ju", t->command,
		 w->lasting ? "from " : "", (uintmax_t)nth);
	if (!*done_p && (lack.used < nth || strcmp(starve_code(answer), "ENOMEM") != 0))
		fail_msg("%s: %s", what, cJSON_PrintUnformatted(answer));
	cJSON_Delete(answer);
	cluster_run(&w->s.c, t->settle_s * LOOP_NS_PER_S);
	w->lost = lack.used >= nth && peering(w) != before_it;
	if (!*done_p && !w->lost)
		nothing_changed(w, before, true, what);
	if (!*done_p && !first && !w->lost)
		nothing_leaked(w, live, false, what);
	free(before);
	return lack.used >= nth;
}

/* Once with memory, so that what is made on first use is there. */
static void warm_up(struct sweep *w, const struct trial *t)
{
	cJSON *answer;

	say_all(w, t->before);
	know_entries(&w->s);
	answer = starve_try(&w->s, t->line, t->fd, NULL);
	if (strcmp(starve_code(answer), "ok") != 0)
		fail_msg("%s: %s", t->line, cJSON_PrintUnformatted(answer));
	cJSON_Delete(answer);
	say_all(w, t->after);
	cluster_run(&w->s.c, LOADS_NS);
}

static void keep_word(struct starve *s, const char *from, const char *as)
{
	for (unsigned int i = 0; i < s->word_count; i++) {
		if (strcmp(s->words[i].name, from) == 0)
			starve_word(s, as, "%s", s->words[i].value);
	}
}

static void sweep_init(struct sweep *w)
{
	struct starve *s = &w->s;
	uint64_t *entry;

	starve_new(s);
	if (w->files)
		assert_int_equal(disk_sim_new(1, DISK_BYTES, &w->disk), 0);
	cluster_store(&s->c, 0,
		      &(struct cluster_store_args){.memory_bytes = 1 << 20,
						   .disk = w->disk,
						   .file_bytes = DISK_BYTES / 2});
	entry = (void *)s->src.base; /* a descriptor list, for dlist.prep by fd */
	entry[0] = (uintptr_t)s->src.base;
	entry[1] = 64;
	entry[2] = 0;
	entry[3] = 1;
	tmp_name(w->shm_name, sizeof(w->shm_name), "/kvd-test");
	w->shm = shm_open(w->shm_name, O_RDWR | O_CREAT | O_EXCL, 0600);
	assert_true(w->shm >= 0 && file_fill(w->shm, 16384) == 0);
	starve_word(s, "shm", "%s", w->shm_name);
	starve_say(s, ATTACH);
	keep_word(s, "attach", "there");
}

static void sweep_fini(struct sweep *w)
{
	starve_free(&w->s);
	disk_sim_free(w->disk);
	close(w->shm);
	shm_unlink(w->shm_name);
}

static int setup(void **state)
{
	struct sweep *w = calloc(1, sizeof(*w));

	sweep_init(w);
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	struct sweep *w = *state;

	sweep_fini(w);
	free(w);
	return 0;
}

static void prepare(struct sweep *w)
{
	starve_say(&w->s, PREP_LOCAL);
	keep_word(&w->s, "dlist", "mine");
	starve_say(&w->s, PREP_REMOTE);
	keep_word(&w->s, "dlist", "yours");
}

/* Other daemons and engines, as they were before the peering was lost. */
static void anew(struct sweep *w, const struct trial *t)
{
	bool lasting = w->lasting, files = w->files;

	sweep_fini(w);
	*w = (struct sweep){.lasting = lasting, .files = files};
	sweep_init(w);
	prepare(w);
	warm_up(w, t);
}

static void sweep(struct sweep *w, const struct trial *t)
{
	bool prepared = false, hit = true, done = false;
	uint64_t nth, before_it;
	int64_t live;
	char *base, what[160];

	warm_up(w, t);
	base = starve_look(&w->s, false);
	live = starve_blocks(&w->s);
	for (nth = 1; hit; nth++) {
		if (nth > 1 && sweep_leaves_out(nth, 6))
			continue;
		if (w->lost) {
			anew(w, t);
			prepared = false;
			free(base);
			base = starve_look(&w->s, false);
			live = starve_blocks(&w->s);
		}
		if (!prepared)
			say_all(w, t->before);
		hit = attempt(w, t, nth, false, &done);
		prepared = !done;
		if (!done || w->lost)
			continue;
		before_it = peering(w);
		say_all(w, t->after);
		/* a peering that is to end does so in a later turn */
		w->lost = hit && !t->far && peering(w) != before_it;
		if (w->lost)
			continue;
		snprintf(what, sizeof(what),
			 "%s, done without allocation %ju, and undone", t->command,
			 (uintmax_t)nth);
		if (t->grows)
			continue;
		nothing_changed(w, base, false, what);
		nothing_leaked(w, live, true, what);
	}
	assert_true(done && nth > 2); /* the hooks do count */
	free(base);
	if (t->settle_s) { /* what is kept of lost peers goes now, not in another trial */
		cluster_run(&w->s.c, 605 * LOOP_NS_PER_S);
		free(starve_look(&w->s, false));
	}
	if (w->lost)
		anew(w, t);
	if (getenv("KVD_TEST_LOG"))
		print_message("%s: %ju allocations\n", t->command, (uintmax_t)nth - 2);
}

static bool is_chosen(const struct trial *t, bool files)
{
	const char *only = getenv("KVD_TEST_COMMAND");
	bool fits = files ? strncmp(t->command, "chunk.", 6) == 0 : !t->files;

	return !t->elsewhere && fits && (!only || fnmatch(only, t->command, 0) == 0);
}

static void sweep_all(struct sweep *w)
{
	prepare(w);
	for (size_t i = 0; i < ARRAY_LEN(trials); i++) {
		if (is_chosen(&trials[i], w->files) && !(w->lasting && trials[i].far))
			sweep(w, &trials[i]);
	}
}

static void command_without_one_allocation_is_done_or_refused(void **state)
{
	sweep_all(*state);
}

/* On daemons that are new each time: tables that have to grow, what is made on first
 * use. What was lost is counted when they are gone. */
static bool first_use(const struct trial *t, uint64_t nth)
{
	int64_t live = mem_live();
	bool done, hit;
	void *state;

	setup(&state);
	prepare(state);
	say_all(state, t->before);
	hit = attempt(state, t, nth, true, &done);
	teardown(&state);
	if (mem_live() != live)
		fail_msg("%s without allocation %ju: %jd heap blocks are lost",
			 t->command, (uintmax_t)nth, (intmax_t)(mem_live() - live));
	return hit;
}

static void command_on_first_use_is_done_or_refused(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(trials); i++) {
		/* long replies are the same each time */
		for (uint64_t nth = 1; is_chosen(&trials[i], false) && nth < 150; nth++) {
			if (!sweep_leaves_out(nth, 6) && !first_use(&trials[i], nth))
				break;
		}
	}
}

static void command_without_memory_is_done_or_refused(void **state)
{
	struct sweep *w = *state;

	w->lasting = true;
	sweep_all(w);
}

/* The store has files, too. */
static void chunks_in_files_without_memory(void **state, bool lasting)
{
	struct sweep *w = *state;

	sweep_fini(w);
	*w = (struct sweep){.lasting = lasting, .files = true};
	sweep_init(w);
	sweep_all(w);
}

static void chunks_in_files_without_one_allocation(void **state)
{
	chunks_in_files_without_memory(state, false);
}

static void chunks_in_files_without_any_memory(void **state)
{
	chunks_in_files_without_memory(state, true);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_command_has_a_trial),
		CASE(command_without_one_allocation_is_done_or_refused),
		CASE(command_without_memory_is_done_or_refused),
		CASE(chunks_in_files_without_one_allocation),
		CASE(chunks_in_files_without_any_memory),
		cmocka_unit_test(command_on_first_use_is_done_or_refused),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests(tests, NULL, NULL);
}

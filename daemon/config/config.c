/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loading has three steps. Defaults: the default of every row is parsed by the same code
 * as a line of the file, so it cannot be outside its own limits. The file: inih splits
 * the lines, one handler finds the row and parses the value; the line of each option is
 * kept for the third step. Checks: a table of functions over the whole struct, each of
 * which refuses one impossible combination and names its line.
 *
 * All faults are found in one run and reported one by one; the first is the returned
 * error. Nothing is applied partially: the caller's struct is written at the end.
 *
 * inih cuts lines at a fixed length, joins indented ones and reports only the line number
 * of a syntax error. So the file is read here, and inih gets complete lines from a reader
 * that counts them and refuses lines that inih would cut.
 */
#include "daemon/config/config.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <grp.h>
#include <ini.h>
#include <sched.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/account.h"
#include "daemon/base/endpoint.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define FILE_MAX_BYTES (1u << 20)
#define LINE_MAX_BYTES 4096

static const char *const known_transports[] = {"local", "shm", "verbs",
					       "ucx",	"tcp", NULL};

struct load {
	struct config config;
	const struct config_source *source;
	const char *path; /* shown before each fault */
	const struct setting *options;
	size_t count;
	unsigned int problems;
	struct err first; /* of the earliest line */
	unsigned int first_line;
	/* the reader's */
	const char *next, *end;
	unsigned int at_line;
};

/* ---- problems ---- */

static void problem(struct load *load, unsigned int line, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

static void problem(struct load *load, unsigned int line, const char *fmt, ...)
{
	char what[ERR_TEXT_MAX], where[CONFIG_PATH_BYTES + 16] = "";
	struct err err;
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(what, sizeof(what), fmt, ap);
	va_end(ap);
	if (line)
		snprintf(where, sizeof(where), "%s:%u: ", load->path, line);
	else if (load->path)
		snprintf(where, sizeof(where), "%s: ", load->path);
	err_set(&err, ERR_CONFIG, "%s%s", where, what);
	if (!load->problems++ || line < load->first_line) {
		load->first = err;
		load->first_line = line;
	}
	if (load->source->on_problem)
		load->source->on_problem(load->source->arg, err.text);
}

static size_t config_row_of(const struct load *load, const char *name)
{
	size_t i = 0;

	while (i < load->count && strcmp(load->options[i].name, name) != 0)
		i++;
	return i;
}

/* The last line that set one of the named options: it made the combination. */
static unsigned int line_of(const struct load *load, const char *a, const char *b)
{
	unsigned int line_a = load->config.line[config_row_of(load, a)];
	unsigned int line_b = load->config.line[config_row_of(load, b)];

	return line_a > line_b ? line_a : line_b;
}

/* ---- the file ---- */

static void set_option(struct load *load, size_t row, const char *value)
{
	const struct setting *setting = &load->options[row];

	if (load->config.line[row]) {
		problem(load, load->at_line, "%s: already set in line %u", setting->name,
			load->config.line[row]);
		return;
	}
	load->config.line[row] = load->at_line;
	if (setting_parse(setting, value, &load->config) < 0)
		problem(load, load->at_line, "%s = %.60s: %s", setting->name, value,
			err_last()->text);
}

static int on_pair(void *arg, const char *section, const char *name, const char *value)
{
	struct load *load = arg;
	size_t row = config_row_of(load, name);

	if (row == load->count)
		problem(load, load->at_line,
			"%.60s: no such option (kvd --print-config lists all)", name);
	else if (strcmp(load->options[row].section, section) != 0)
		problem(load, load->at_line, "%s: belongs in [%s], not [%.60s]", name,
			load->options[row].section, section);
	else
		set_option(load, row, value);
	return 1;
}

/* inih's fgets: one whole line a call. */
static char *config_next_line(char *buf, int size, void *arg)
{
	struct load *load = arg;
	const char *eol;
	size_t len;

	if (load->next == load->end)
		return NULL;
	load->at_line++;
	eol = memchr(load->next, '\n', (size_t)(load->end - load->next));
	len = (size_t)((eol ? eol : load->end) - load->next);
	if (memchr(load->next, 0, len) || len + 3 > (size_t)size) {
		problem(load, load->at_line, "a NUL byte, or over %d bytes", size - 3);
		len = 0;
		buf[0] = '\0';
	} else {
		memcpy(buf, load->next, len);
	}
	buf[len] = '\n';
	buf[len + 1] = '\0';
	load->next = eol ? eol + 1 : load->end;
	return buf;
}

/* The file's bytes; ERR_CONFIG with its name. */
static int config_read_file(const char *path, char **text_p, size_t *len_p)
{
	cleanup_free char *text = mem_alloc(FILE_MAX_BYTES + 1);
	FILE *file;
	size_t len;
	int no;

	if (!text)
		return err_pass(-ENOMEM);
	file = fopen(path, "re");
	if (!file)
		return err_raise(ERR_CONFIG, "%s: %s", path, strerror(errno));
	errno = 0;
	len = fread(text, 1, FILE_MAX_BYTES + 1, file);
	no = ferror(file) ? errno : 0;
	fclose(file);
	if (no)
		return err_raise(ERR_CONFIG, "%s: %s", path, strerror(no));
	if (len > FILE_MAX_BYTES)
		return err_raise(ERR_CONFIG, "%s: over %u bytes", path, FILE_MAX_BYTES);
	*text_p = mem_steal(text);
	*len_p = len;
	return 0;
}

static int load_file(struct load *load)
{
	static char comments[] = ";#";
	cleanup_free char *text = NULL;
	size_t len = 0;
	int r = config_read_file(load->path, &text, &len);

	if (r < 0)
		return err_pass(r);
	load->next = text;
	load->end = text + len;
	ini_use_stack = false; /* its stack buffer holds 200 bytes */
	ini_initial_alloc = LINE_MAX_BYTES;
	ini_max_line = LINE_MAX_BYTES;
	ini_allow_realloc = false;
	ini_allow_multiline = false;
	ini_allow_no_value = false;
	ini_inline_comment_prefixes = comments;
	r = ini_parse_stream(config_next_line, load, on_pair, load);
	if (r == -2)
		return err_raise(ERR_NOMEM, "%s: out of memory", load->path);
	if (r > 0)
		problem(load, (unsigned int)r, "neither [section] nor option = value");
	return 0;
}

/* Find the file to read: load->path, or NULL for defaults only. */
static void find_file(struct load *load, const char *name)
{
	struct config *config = &load->config;

	load->path = load->source->path;
	if (!load->path)
		load->path = getenv("KVD_CONFIG");
	if (load->path && *load->path) {
		snprintf(config->path, sizeof(config->path), "%s", load->path);
		return;
	}
	snprintf(config->path, sizeof(config->path), "/etc/kvd/%s.conf", name);
	if (access(config->path, F_OK) != 0)
		snprintf(config->path, sizeof(config->path), "/etc/kvd/kvd.conf");
	if (access(config->path, F_OK) != 0)
		config->path[0] = '\0';
	load->path = config->path[0] ? config->path : NULL;
}

/* ---- combinations ---- */

static bool name_is_valid(const char *name)
{
	return *name && *name != '.' &&
	       strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
			    "0123456789._-") == strlen(name);
}

static void check_name(struct load *load)
{
	const struct config *config = &load->config;
	const size_t max = sizeof(((struct sockaddr_un *)NULL)->sun_path);

	if (!name_is_valid(config->name))
		problem(load, line_of(load, "name", "name"),
			"name = %s: letters, digits, '.', '_' and '-', not a '.' first",
			config->name);
	if (strlen(config->socket_path) >= max)
		problem(load, line_of(load, "socket_path", "run_dir"),
			"socket_path = %s: a socket's path has at most %zu bytes",
			config->socket_path, max - 1);
	if (!*config->run_dir)
		problem(load, line_of(load, "run_dir", "run_dir"), "run_dir: empty");
}

static void check_socket(struct load *load)
{
	const struct config *config = &load->config;
	const char *group = config->socket_group;

	if ((config->socket_mode & 2) && !config->allow_uids.count &&
	    !config->allow_gids.count)
		problem(load, line_of(load, "socket_mode", "allow_uids"),
			"socket_mode = %04o: open to all users; set allow_uids or "
			"allow_gids",
			config->socket_mode);
	if (*group && strspn(group, "0123456789") != strlen(group) && !getgrnam(group))
		problem(load, line_of(load, "socket_group", "socket_group"),
			"socket_group = %s: no such group", group);
}

/* tcp://HOST:PORT; *host_p without brackets. */
static bool endpoint_split(const char *endpoint, char host[CONFIG_ENDPOINT_BYTES],
			   unsigned long *port_p)
{
	const char *colon = strrchr(endpoint, ':');
	size_t len;
	char *end;

	if (strncmp(endpoint, "tcp://", 6) != 0 || !colon || colon < endpoint + 7)
		return false;
	len = (size_t)(colon - endpoint) - 6;
	memcpy(host, endpoint + 6, len);
	host[len] = '\0';
	if (host[0] == '[' && host[len - 1] == ']') {
		memmove(host, host + 1, len - 2);
		host[len - 2] = '\0';
	} else if (strchr(host, ':')) {
		return false;
	}
	if (strspn(colon + 1, "0123456789") != strlen(colon + 1) || !colon[1])
		return false;
	*port_p = strtoul(colon + 1, &end, 10);
	return *host && *port_p <= 65535;
}

enum host_kind { HOST_NAME, HOST_LOOPBACK, HOST_ANY, HOST_ADDRESS };

static enum host_kind host_kind(const char *host)
{
	struct in6_addr six;
	struct in_addr four;

	if (strcmp(host, "*") == 0)
		return HOST_ANY;
	if (inet_pton(AF_INET, host, &four) == 1) {
		if (four.s_addr == htonl(INADDR_ANY))
			return HOST_ANY;
		return ntohl(four.s_addr) >> 24 == 127 ? HOST_LOOPBACK : HOST_ADDRESS;
	}
	if (inet_pton(AF_INET6, host, &six) == 1) {
		if (IN6_IS_ADDR_UNSPECIFIED(&six))
			return HOST_ANY;
		return IN6_IS_ADDR_LOOPBACK(&six) ? HOST_LOOPBACK : HOST_ADDRESS;
	}
	return HOST_NAME;
}

/* HOST_NAME after a problem: it is no address to listen on. */
static enum host_kind listen_kind(struct load *load, const char *option,
				  const char *listen)
{
	char host[CONFIG_ENDPOINT_BYTES];
	unsigned long port;
	enum host_kind kind =
		endpoint_split(listen, host, &port) ? host_kind(host) : HOST_NAME;

	if (kind == HOST_NAME)
		problem(load, line_of(load, option, option),
			"%s = %s: allowed: tcp://ADDRESS:PORT, the address a number "
			"or *, port 0 to 65535",
			option, listen);
	return kind;
}

static void check_listen(struct load *load)
{
	const struct config *config = &load->config;

	if (listen_kind(load, "listen", config->listen) == HOST_ANY &&
	    !*config->advertise)
		problem(load, line_of(load, "listen", "listen"),
			"listen = %s: peers cannot connect to this address; "
			"set advertise",
			config->listen);
	if (*config->tcp_listen)
		listen_kind(load, "tcp_listen", config->tcp_listen);
}

static void check_metrics_listen(struct load *load)
{
	const char *listen = load->config.metrics_listen;
	unsigned int line = line_of(load, "metrics_listen", "metrics_listen");
	const size_t max = sizeof(((struct sockaddr_un *)NULL)->sun_path);
	char host[CONFIG_ENDPOINT_BYTES];
	unsigned long port;

	if (!*listen)
		return;
	if (strncmp(listen, "unix:", 5) == 0) {
		if (listen[5] != '/' || strlen(listen + 5) >= max)
			problem(load, line,
				"metrics_listen = %s: unix: requires an absolute path "
				"of at most %zu bytes",
				listen, max - 1);
	} else if (!endpoint_split(listen, host, &port) || !port) {
		problem(load, line,
			"metrics_listen = %s: allowed: tcp://127.0.0.1:PORT with a port "
			"of 1 to 65535, or unix:/PATH",
			listen);
	} else if (host_kind(host) != HOST_LOOPBACK) {
		problem(load, line,
			"metrics_listen = %s: the server has no authentication; "
			"allowed: a loopback address or unix:/PATH (for other "
			"addresses use an authenticating proxy)",
			listen);
	}
}

static void check_advertise(struct load *load)
{
	const struct config *config = &load->config;
	char host[CONFIG_ENDPOINT_BYTES];
	unsigned long port;

	if (*config->advertise && (!endpoint_split(config->advertise, host, &port) ||
				   host_kind(host) == HOST_ANY))
		problem(load, line_of(load, "advertise", "advertise"),
			"advertise = %s: allowed: tcp://HOST:PORT that others can reach",
			config->advertise);
}

static void check_endpoints(struct load *load, const char *option, const char *words)
{
	char word[ENDPOINT_MAX], canon[ENDPOINT_MAX];
	size_t len;

	for (words += strspn(words, " ,"); *words;
	     words += len, words += strspn(words, " ,")) {
		len = strcspn(words, " ,");
		snprintf(word, sizeof(word), "%.*s", (int)len, words);
		if (len >= sizeof(word) || endpoint_canon(word, canon) < 0)
			problem(load, line_of(load, option, option),
				"%s: '%.64s': allowed: endpoints of other daemons, "
				"tcp://HOST:PORT",
				option, word);
		err_clear();
	}
}

static void check_chunk_endpoints(struct load *load)
{
	check_endpoints(load, "chunk_peers", load->config.chunk_peers);
	if (strcmp(load->config.chunk_index, "cluster") != 0)
		check_endpoints(load, "chunk_index", load->config.chunk_index);
}

static void check_keys(struct load *load)
{
	const struct config *config = &load->config;

	if (*config->curve_secret_file && !*config->curve_allow_file)
		problem(load, line_of(load, "curve_secret_file", "curve_secret_file"),
			"curve_secret_file: requires curve_allow_file, the daemons "
			"that may connect");
	if (*config->curve_secret_file && *config->keys_dir)
		problem(load, line_of(load, "curve_secret_file", "keys_dir"),
			"keys_dir: not used with curve_secret_file; set one of them");
	if (config->insecure && !*config->curve_secret_file &&
	    (*config->curve_allow_file || *config->keys_dir))
		problem(load, line_of(load, "insecure", "curve_allow_file"),
			"%s: with insecure = yes there are no keys; set one of them",
			*config->keys_dir ? "keys_dir" : "curve_allow_file");
}

/* Times and sizes. */
static void check_amounts(struct load *load)
{
	const struct config *config = &load->config;

	if (config->dead_after_ns < 2 * config->ping_interval_ns)
		problem(load, line_of(load, "dead_after", "ping"),
			"dead_after: must be at least twice ping");
	if (config->slice_bytes > config->max_inflight_bytes)
		problem(load, line_of(load, "copy_slice", "max_inflight"),
			"copy_slice: larger than max_inflight");
	if (*config->chunk_dir && !config->chunk_memory_bytes)
		problem(load, line_of(load, "chunk_dir", "chunk_dir"),
			"chunk_dir: requires chunk_memory, through which chunks pass");
}

/* A word that is not a device id would silently mean `off`. */
static void check_gpu(struct load *load)
{
	const char *word = load->config.gpu;
	size_t len;

	if (strcmp(word, "auto") == 0 || strcmp(word, "off") == 0)
		return;
	for (word += strspn(word, " \t,"); *word;
	     word += len + strspn(word + len, " \t,")) {
		len = strcspn(word, " \t,");
		if (!memchr(word, '-', len) && !memchr(word, ':', len))
			problem(load, line_of(load, "gpus", "gpus"),
				"gpus = %.40s: allowed: auto, off, or UUIDs (GPU-...) "
				"and PCI ids (0000:3b:00.0)",
				load->config.gpu);
	}
}

static bool list_has(const char *const *list, const char *word)
{
	while (*list && strcmp(*list, word) != 0)
		list++;
	return *list != NULL;
}

static void check_transports(struct load *load)
{
	const struct config *config = &load->config;
	const char *const *built = load->source->transports;
	unsigned int line = line_of(load, "transports", "transports");
	char list[128] = "";

	for (size_t i = 0, n = 0; built[i] && n < sizeof(list); i++)
		n += (size_t)snprintf(list + n, sizeof(list) - n, "%s%s", i ? ", " : "",
				      built[i]);
	if (!config->transports.count && built[0])
		problem(load, line, "transports: the list is empty; use %s", list);
	for (unsigned int i = 0; i < config->transports.count; i++) {
		const char *word = config->transports.word[i];

		if (!list_has(built, word))
			problem(load, line, "transports: %s is %s; use %s", word,
				list_has(known_transports, word)
					? "not built in (make MODULES=)"
					: "unknown",
				list);
	}
	if (config->chunk_memory_bytes && config->transports.count &&
	    !setting_words_have(&config->transports, "shm"))
		problem(load, line,
			"transports: shm is missing, and chunk_memory needs it for this "
			"daemon's engines; add shm (require still applies between "
			"daemons), or set chunk_memory = off");
	if (setting_words_have(&config->transports, "ucx") && !config->insecure &&
	    !endpoint_is_loopback(config->listen))
		problem(load, line_of(load, "transports", "listen"),
			"transports: ucx does not authenticate its connections; on an "
			"address other than loopback it requires insecure = yes");
}

static void check_require(struct load *load)
{
	const struct config *config = &load->config;

	for (unsigned int i = 0; i < config->require.count; i++) {
		const char *word = config->require.word[i];
		bool can = setting_words_have(&config->transports, word);

		if (strcmp(word, "rdma") == 0)
			can = setting_words_have(&config->transports, "verbs") ||
			      setting_words_have(&config->transports, "ucx");
		if (!can)
			problem(load, line_of(load, "require", "transports"),
				"require = %s: no such transport among those configured",
				word);
	}
}

/* ---- values of "auto" and empty options ---- */

static uint32_t half_the_cores(uint32_t min, uint32_t max)
{
	cpu_set_t set;
	uint32_t n = 2;

	if (sched_getaffinity(0, sizeof(set), &set) == 0)
		n = (uint32_t)CPU_COUNT(&set);
	n /= 2;
	return n < min ? min : n > max ? max : n;
}

static void resolve_transports(struct load *load)
{
	struct config *config = &load->config;
	struct setting_words *words = &config->transports;
	bool open = !endpoint_is_loopback(config->listen) && !config->insecure;

	if (words->count != 1 || strcmp(words->word[0], "auto") != 0)
		return;
	config->transports_auto = true;
	words->count = 0;
	for (const char *const *name = load->source->transports;
	     *name && words->count < SETTING_WORDS_MAX; name++) {
		if (open && strcmp(*name, "ucx") == 0)
			continue;
		snprintf(words->word[words->count++], SETTING_WORD_BYTES, "%s", *name);
	}
}

static void config_resolve(struct load *load)
{
	struct config *config = &load->config;

	if (config->log_format == LOG_FORMAT_AUTO)
		config->log_format = (uint32_t)log_format_of_stderr();
	config->peer_part_bytes = PEER_PART_BYTES;
	if (!config->memory_bytes)
		config->memory_bytes = accounts_preset();
	if (!config->offload_threads)
		config->offload_threads = half_the_cores(2, 8);
	if (!config->tcp_streams)
		config->tcp_streams = half_the_cores(1, 8);
	if (!config->tcp_threads)
		config->tcp_threads = half_the_cores(1, 8);
	if (!config->copy_threads)
		config->copy_threads = half_the_cores(1, 8);
	if (!*config->socket_path) {
		int n = snprintf(config->socket_path, sizeof(config->socket_path),
				 "%.180s/%s.sock", config->run_dir, config->name);

		if (n < 0)
			config->socket_path[0] = '\0';
	}
	resolve_transports(load);
}

static void (*const checks[])(struct load *load) = {
	check_name,
	check_socket,
	check_listen,
	check_advertise,
	check_keys,
	check_metrics_listen,
	check_amounts,
	check_transports,
	check_require,
	check_gpu,
	check_chunk_endpoints,
};

/* ---- entry points ---- */

int config_load(struct config *config, const struct config_source *source)
{
	cleanup_free struct load *load = mem_zalloc(sizeof(*load));
	const char *name = source->name ? source->name : getenv("KVD_NAME");
	int r = 0;

	if (!load)
		return err_pass(-ENOMEM);
	load->source = source;
	load->options = config_settings(&load->count);
	assert(load->count <= CONFIG_OPTIONS_MAX);
	for (size_t i = 0; i < load->count && r == 0; i++)
		r = setting_parse(&load->options[i], load->options[i].preset,
				  &load->config);
	if (r < 0)
		return err_pass(r);
	if (name && !name_is_valid(name))
		return err_raise(ERR_CONFIG,
				 "name '%.64s': letters, digits, '.', '_', '-'", name);
	find_file(load, name ? name : load->config.name);
	if (load->path) {
		r = load_file(load);
		if (r < 0)
			return err_pass(r);
	}
	if (name && setting_parse(&load->options[config_row_of(load, "name")], name,
				  &load->config) < 0)
		problem(load, 0, "name '%.64s': %s", name, err_last()->text);
	config_resolve(load);
	for (size_t i = 0; i < ARRAY_LEN(checks); i++)
		checks[i](load);
	if (load->problems)
		return err_reraise(&load->first);
	if (name)
		load->config.line[config_row_of(load, "name")] = CONFIG_LINE_ARGUMENT;
	*config = load->config;
	return 0;
}

#define MIB (UINT64_C(1) << 20)

/* The default of `memory_limit` is a fraction of the limit. */
int config_memory_check(const struct config *config, uint64_t limit_bytes)
{
	uint64_t all = config->chunk_memory_bytes + config->chunk_index_bytes;
	unsigned long long mib = limit_bytes / MIB;

	if (config_line_of(config, "memory_limit") != CONFIG_LINE_DEFAULT)
		all += config->memory_bytes;
	if (config->chunk_memory_bytes && config->chunk_memory_bytes >= limit_bytes)
		return err_raise(
			ERR_CONFIG,
			"chunk_memory: %llu MiB exceed the memory of this process "
			"(%llu MiB, from its control group or the machine); "
			"lower it, or raise MemoryMax=",
			(unsigned long long)config->chunk_memory_bytes / MIB, mib);
	if (all < limit_bytes)
		return 0;
	err_raise(ERR_CONFIG,
		  "chunk_memory, chunk_index_memory, memory_limit: together %llu "
		  "MiB exceed the memory of this process (%llu MiB, from its control "
		  "group or the machine); lower them, or raise MemoryMax=",
		  (unsigned long long)all / MIB, mib);
	return 1;
}

uint32_t config_line_of(const struct config *config, const char *name)
{
	const struct setting *row;
	size_t count;

	row = config_settings(&count);
	for (size_t i = 0; i < count; i++) {
		if (strcmp(row[i].name, name) == 0)
			return config->line[i];
	}
	return CONFIG_LINE_DEFAULT;
}

unsigned int config_reload(struct config *config, const struct config *fresh,
			   void (*on_kept)(void *arg, const char *name), void *arg)
{
	const struct setting *row;
	unsigned int changed = 0;
	char name[64];
	size_t count;

	row = config_settings(&count);
	for (size_t i = 0; i < count; i++, row++) {
		if (setting_equal(row, config, fresh))
			continue;
		if (row->reload) {
			setting_copy(row, config, fresh);
			config->line[i] = fresh->line[i];
			changed++;
			continue;
		}
		snprintf(name, sizeof(name), "%s.%s", row->section, row->name);
		on_kept(arg, name);
	}
	return changed;
}

bool config_is_admin(const struct config *config, uid_t uid)
{
	bool found = uid == 0 || uid == geteuid();

	for (unsigned int i = 0; i < config->admin_uids.count; i++)
		found = found || config->admin_uids.id[i] == uid;
	return found;
}

bool config_admits(const struct config *config, uid_t uid, const gid_t *gids,
		   size_t gid_count)
{
	if (config_is_admin(config, uid))
		return true;
	if (!config->allow_uids.count && !config->allow_gids.count)
		return true;
	for (unsigned int i = 0; i < config->allow_uids.count; i++) {
		if (config->allow_uids.id[i] == uid)
			return true;
	}
	for (unsigned int i = 0; i < config->allow_gids.count; i++) {
		for (size_t k = 0; k < gid_count; k++) {
			if (config->allow_gids.id[i] == gids[k])
				return true;
		}
	}
	return false;
}

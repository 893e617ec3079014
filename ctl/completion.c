/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command completion: prints a shell script generated from the tables of commands and
 * options. Option values are not completed, except the instance after --name.
 */
#include <stdio.h>
#include <string.h>

#include "ctl/ctl.h"

static const char common[] = "--socket --name --timeout --json --help";

/* Options of a command, each preceded by a space. */
static void put_options(const struct ctl_command *c, FILE *out)
{
	const char *name;

	for (unsigned int i = 0; (name = ctl_option(c, i)); i++) {
		if (*name)
			fprintf(out, " --%s", name);
	}
}

static void put_names(FILE *out)
{
	for (const struct ctl_command *c = ctl_commands; c->name; c++)
		fprintf(out, "%s%s", c == ctl_commands ? "" : " ", c->name);
}

static void put_bash(FILE *out)
{
	fputs("_kvd_ctl() {\n"
	      "\tlocal word=${COMP_WORDS[COMP_CWORD]}\n"
	      "\tlocal before=${COMP_WORDS[COMP_CWORD-1]}\n"
	      "\tlocal command= options= i s dir=${KVD_RUN_DIR:-/run/kvd}\n"
	      "\tcase $before in\n"
	      "\t-n|--name)\n"
	      "\t\tfor s in \"$dir\"/*.sock; do\n"
	      "\t\t\ts=${s##*/}; options+=\" ${s%.sock}\"\n"
	      "\t\tdone\n"
	      "\t\tCOMPREPLY=($(compgen -W \"$options\" -- \"$word\")); return ;;\n"
	      "\t-s|--socket) COMPREPLY=($(compgen -f -- \"$word\")); return ;;\n"
	      "\tesac\n"
	      "\tfor ((i = 1; i < COMP_CWORD; i++)); do\n"
	      "\t\tcase ${COMP_WORDS[i]} in\n"
	      "\t\t-n|--name|-s|--socket|-t|--timeout) ((i++)) ;;\n"
	      "\t\t-*) ;;\n"
	      "\t\t*) command=${COMP_WORDS[i]}; break ;;\n"
	      "\t\tesac\n"
	      "\tdone\n"
	      "\tcase $command in\n"
	      "\t'') options=\"",
	      out);
	put_names(out);
	fputs("\" ;;\n", out);
	for (const struct ctl_command *c = ctl_commands; c->name; c++) {
		fprintf(out, "\t%s) options=\"", c->name);
		put_options(c, out);
		fputs("\" ;;\n", out);
	}
	fprintf(out,
		"\tesac\n"
		"\tif [[ $command != '' && $word != -* ]]; then\n"
		"\t\tCOMPREPLY=($(compgen -f -- \"$word\"))\n"
		"\telse\n"
		"\t\tCOMPREPLY=($(compgen -W \"$options %s\" -- \"$word\"))\n"
		"\tfi\n"
		"}\n"
		"complete -F _kvd_ctl kvd-ctl\n",
		common);
}

/* zsh runs a file in fpath as the function's body at the first completion; the script may
 * also be sourced. */
static void put_zsh(FILE *out)
{
	fputs("#compdef kvd-ctl\n"
	      "_kvd-ctl() {\n"
	      "\tlocal command= i dir=${KVD_RUN_DIR:-/run/kvd}\n"
	      "\tlocal -a options names commands\n"
	      "\tcase ${words[CURRENT-1]} in\n"
	      "\t-n|--name) names=($dir/*.sock(N:t:r)); compadd -a names; return ;;\n"
	      "\t-s|--socket) _files; return ;;\n"
	      "\tesac\n"
	      "\tfor ((i = 2; i < CURRENT; i++)); do\n"
	      "\t\tcase ${words[i]} in\n"
	      "\t\t-n|--name|-s|--socket|-t|--timeout) ((i++)) ;;\n"
	      "\t\t-*) ;;\n"
	      "\t\t*) command=${words[i]}; break ;;\n"
	      "\t\tesac\n"
	      "\tdone\n"
	      "\tif [[ -z $command && ${words[CURRENT]} != -* ]]; then\n"
	      "\t\tcommands=(",
	      out);
	for (const struct ctl_command *c = ctl_commands; c->name; c++)
		fprintf(out, "\n\t\t\t\"%s:%s\"", c->name, c->summary);
	fputs(")\n\t\t_describe command commands\n\t\treturn\n\tfi\n"
	      "\tcase $command in\n",
	      out);
	for (const struct ctl_command *c = ctl_commands; c->name; c++) {
		fprintf(out, "\t%s) options=(", c->name);
		put_options(c, out);
		fputs(") ;;\n", out);
	}
	fprintf(out,
		"\tesac\n"
		"\tif [[ ${words[CURRENT]} == -* ]]; then\n"
		"\t\tcompadd -- $options %s\n"
		"\telse\n"
		"\t\t_files\n"
		"\tfi\n"
		"}\n"
		"if [[ $funcstack[1] == _kvd-ctl ]]; then\n"
		"\t_kvd-ctl \"$@\"\n"
		"else\n"
		"\tcompdef _kvd-ctl kvd-ctl\n"
		"fi\n",
		common);
}

static void put_fish(FILE *out)
{
	const char *name;

	fputs("function __kvd_ctl_is\n" /* whether this is the command; "": none yet */
	      "\tset -l skip 0\n"
	      "\tset -l command\n"
	      "\tset -l words (commandline -opc)\n"
	      "\tfor word in $words[2..-1]\n"
	      "\t\tif test $skip = 1\n"
	      "\t\t\tset skip 0\n"
	      "\t\t\tcontinue\n"
	      "\t\tend\n"
	      "\t\tswitch $word\n"
	      "\t\t\tcase -n --name -s --socket -t --timeout\n"
	      "\t\t\t\tset skip 1\n"
	      "\t\t\tcase '-*'\n"
	      "\t\t\tcase '*'\n"
	      "\t\t\t\tset command $word\n"
	      "\t\t\t\tbreak\n"
	      "\t\tend\n"
	      "\tend\n"
	      "\ttest \"$command\" = \"$argv[1]\"\n"
	      "end\n"
	      "function __kvd_ctl_instances\n"
	      "\tset -l dir /run/kvd\n"
	      "\tset -q KVD_RUN_DIR; and set dir $KVD_RUN_DIR\n"
	      "\tfor s in $dir/*.sock\n"
	      "\t\tstring replace -r '.*/(.*)\\.sock$' '$1' $s\n"
	      "\tend\n"
	      "end\n"
	      "complete -c kvd-ctl -s s -l socket -r\n"
	      "complete -c kvd-ctl -s n -l name -x -a '(__kvd_ctl_instances)'\n"
	      "complete -c kvd-ctl -s t -l timeout -x\n"
	      "complete -c kvd-ctl -s j -l json\n"
	      "complete -c kvd-ctl -s h -l help\n",
	      out);
	for (const struct ctl_command *c = ctl_commands; c->name; c++) {
		fprintf(out,
			"complete -c kvd-ctl -n \"__kvd_ctl_is ''\" -f "
			"-a %s -d \"%s\"\n",
			c->name, c->summary);
		for (unsigned int i = 0; (name = ctl_option(c, i)); i++) {
			if (*name)
				fprintf(out,
					"complete -c kvd-ctl -n "
					"'__kvd_ctl_is %s' -l %s\n",
					c->name, name);
		}
	}
}

int ctl_run_completion(struct ctl *ctl)
{
	static const struct {
		const char *shell;
		void (*put)(FILE *out);
	} shells[] = {{"bash", put_bash}, {"zsh", put_zsh}, {"fish", put_fish}};

	for (unsigned int i = 0; i < 3; i++) {
		if (strcmp(ctl->args[0], shells[i].shell) != 0)
			continue;
		shells[i].put(stdout);
		return CTL_OK;
	}
	return ctl_usage("completion: bash, zsh or fish, not '%s'", ctl->args[0]);
}
